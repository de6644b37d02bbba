"""``torchrun`` and nothing else: ``fit`` starts and ends the process group by itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.docs.test_readme import PROGRAM, write_data
from tighter_gp.training import distributed

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--local-ranks-filter", "0"]


def run(folder: Path, program: str, processes: int) -> subprocess.CompletedProcess:
    folder.mkdir(exist_ok=True)
    (folder / "program.py").write_text(program, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", *(TORCHRUN if processes == 2 else []), "program.py"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def test_the_program_of_the_readme_is_the_same_in_two_processes(tmp_path):
    program = PROGRAM.replace('"epochs": 30', '"epochs": 4, "batch_size": 64').replace(
        "num_inducing=256", "num_inducing=32"
    )
    assert ".float()" in program
    program = program.replace(".float()", ".double()")
    program = "import torch\ntorch.set_default_dtype(torch.float64)\n" + program
    found = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        folder.mkdir()
        write_data(folder)
        done = run(folder, program, processes)
        assert done.returncode == 0, done.stderr
        numbers = [float(number) for number in re.findall(r"(?:NLPD|intervals:) (-?[\d.]+)", done.stdout)]
        assert len(numbers) == 2, done.stdout
        saved = torch.load(folder / "run.pt", weights_only=True)
        assert saved["finished"]
        found.append((numbers, torch.tensor(saved["history"]["loss"]), saved["model"]))
        assert sorted(path.name for path in folder.iterdir()) == ["data.csv", "model.pt", "program.py", "run.pt"]
    (one, one_losses, one_model), (two, two_losses, two_model) = found
    assert two == pytest.approx(one, rel=1e-6)
    torch.testing.assert_close(two_losses, one_losses, rtol=1e-7, atol=1e-7)
    for name, value in one_model.items():
        torch.testing.assert_close(two_model[name], value, rtol=1e-5, atol=1e-6)


START = """
import os, sys, torch, tighter_gp
import torch.distributed as dist
torch.set_default_dtype(torch.float64)
from tests.training.problems import data, problem
rank = int(os.environ["RANK"])
"""

TWICE = """
for steps in (3, 4):
    count = lambda step: seen.add(dist.get_world_size())
    tighter_gp.fit(*problem(), *data(), steps=steps, batch_size=16, callbacks=[count])
    assert not dist.is_initialized()
assert seen == {2}
try:
    tighter_gp.fit(*problem(), *data(), steps=0)
except ValueError:
    assert not dist.is_initialized()
"""

DIFFERENT = """
x, y = data()
try:
    tighter_gp.fit(*problem(), x, y + rank, steps=3, batch_size=16, checkpoint="run.pt")
except ValueError as error:
    assert "The training data of process 1 differ from those of process 0" in str(error), error
    assert not dist.is_initialized()
    sys.exit(0)
sys.exit(1)
"""


def test_a_group_lasts_as_long_as_a_fit_and_can_be_had_again(tmp_path):
    done = run(tmp_path, START + "seen = set()\n" + TWICE, 2)
    assert done.returncode == 0, done.stderr


def test_processes_with_different_data_are_told_so(tmp_path):
    done = run(tmp_path, START + DIFFERENT, 2)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "run.pt").exists()


def test_a_gpu_that_is_not_the_process_own_is_named(monkeypatch):
    for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with (
        pytest.raises(ValueError, match=r"on cuda:0 in the process with LOCAL_RANK 1: move model and data to cuda:1"),
        distributed.group(torch.device("cuda", 0)),
    ):
        raise AssertionError
