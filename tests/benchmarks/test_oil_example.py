"""``python -m benchmarks oil_example``: GPyTorch's example, and ours in two of its lines."""

from __future__ import annotations

import argparse
import json

import pytest
import torch

from benchmarks import oil_example
from benchmarks.errors import UserError
from benchmarks.gplvm.rows import make_phases


def arguments(*flags):
    parser = argparse.ArgumentParser()
    oil_example.add_arguments(parser)
    return parser.parse_args(list(flags))


@pytest.fixture(autouse=True)
def _single_precision():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def run():
    config = {"steps": 12, "batch_size": 20, "lr": 0.01, "dtype": "float32"}
    return {"dataset": "phases", "split": 0, "seed": 3, "method": "tv-bgplvm", "num_inducing": 4, "config": config}


@pytest.fixture
def rows():
    return make_phases(40, seed=0)[0].float()


def test_smoke_leaves_a_line_per_method_with_both_bounds_and_a_trace(tmp_path):
    oil_example.run(arguments("--smoke", "--out", str(tmp_path)))
    lines = [json.loads(line) for line in (tmp_path / "smoke" / "oil_example.jsonl").read_text().splitlines()]
    assert [line["method"] for line in lines] == ["v-bgplvm", "tv-bgplvm"]
    for line in lines:
        assert line["bound_tighter"] > line["bound_base"]
        assert line["trace"][-1]["bound"] > line["trace"][0]["bound"]
        assert line["milliseconds"] > 0
        assert len(line["noises"]) == line["num_inputs"] == 12
    assert not (tmp_path / "smoke" / "checkpoints").exists()


def test_both_methods_start_from_the_same_draws(run, rows):
    first, second = (oil_example.Training({**run, "method": method}, rows) for method in oil_example.METHODS)
    own = second.model.state_dict()
    for name, value in first.model.state_dict().items():
        assert torch.equal(value, own[name]), name
    # The first batch, its draw of X and its KL divergence too: only the objective differs.
    first.step()
    second.step()
    assert second.losses[0] < first.losses[0]


def test_a_run_that_was_stopped_ends_with_the_same_losses(run, rows, tmp_path, monkeypatch):
    whole = oil_example.train(run, rows, tmp_path / "whole.pt", resume=False)
    save = oil_example.Training.save

    def stop(self, path):
        save(self, path)
        if len(self.losses) == 5:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(oil_example.Training, "save", stop)
        with pytest.raises(KeyboardInterrupt):
            oil_example.train(run, rows, tmp_path / "parts.pt", resume=False, every=5)
    parts = oil_example.train(run, rows, tmp_path / "parts.pt", resume=True, every=5)
    for name in ("bound", "bound_tighter", "noise", "trace"):
        assert parts[name] == whole[name]


def test_a_trace_has_the_mean_of_each_part():
    points = oil_example.trace([float(i) for i in range(120)])
    assert len(points) == 60
    assert points[1] == {"step": 4, "bound": -2.5}


@pytest.mark.parametrize(
    ("flags", "message"), [(("--steps", "0"), "--steps must be"), (("--batch-size", "151"), "151 is more than the 150")]
)
def test_what_makes_no_sense_is_refused(tmp_path, flags, message):
    with pytest.raises(UserError, match=message):
        oil_example.run(arguments("--smoke", *flags, "--out", str(tmp_path)))
