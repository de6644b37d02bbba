"""The experiments run, are interrupted, and resume to the same numbers."""

from __future__ import annotations

import argparse
import importlib.util
import math
from collections import Counter

import numpy as np
import pytest
import torch

import tighter_gp
from benchmarks import blocks, mnist, models, prediction, runs, uci
from benchmarks.data import Split, load_digits
from tests.benchmarks.support import (
    EXPERIMENTS,
    SMALL,
    lines,
    own_set,
)


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


def test_a_start_from_the_data_ends_no_worse_in_the_training_bound(cli, tmp_path):
    assert cli("prediction", "--smoke", "--methods", "drop", "--start", "median", "data", "--out", tmp_path) == 0
    median, better = lines(tmp_path / "smoke" / "prediction.jsonl")
    assert "start" not in median["config"]
    assert better["config"]["start"] == "data"
    assert better["start"] in ("median", "exact")
    assert better["bound"] >= median["bound"] - 1e-3


def test_few_splits_of_a_large_set_are_predicted_by_default(cli, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(prediction, "check_sizes", lambda *args: None)
    monkeypatch.setattr(runs.Session, "plan", lambda self, planned: seen.extend(planned))
    monkeypatch.setattr(runs.Session, "all_done", lambda self, planned: True)
    assert cli("prediction", "--methods", "drop", "--out", tmp_path) == 0
    counts = Counter((one["dataset"], one["config"].get("start", "median")) for one in seen)
    for start in ("median", "data"):
        assert [counts[name, start] for name in ("wine", "solar", "pumadyn32nm")] == [10, 10, 3]


def test_a_second_smoke_run_replaces_the_first(cli, tmp_path):
    for _ in range(2):
        assert cli("prediction", "--smoke", "--methods", "drop", "--out", tmp_path) == 0
    assert len(lines(tmp_path / "smoke" / "prediction.jsonl")) == 1


def test_a_line_says_that_the_machine_was_quiet_and_is_the_same_run(cli, tmp_path):
    common = ("prediction", "--smoke", "--methods", "drop", "--out", tmp_path)
    assert cli(*common) == 0
    (before,) = lines(tmp_path / "smoke" / "prediction.jsonl")
    assert cli(*common, "--quiet-machine") == 0
    (after,) = lines(tmp_path / "smoke" / "prediction.jsonl")
    assert "quiet_machine" not in before
    assert after["quiet_machine"] is True
    assert runs.identity(before) == runs.identity(after)


def test_the_command_of_several_processes_is_that_of_torchrun(monkeypatch):
    monkeypatch.setattr(runs.distributed, "world_size", lambda: 2)
    assert runs.command(["uci", "--out", "x"]) == "torchrun --nproc-per-node 2 -m benchmarks uci"


def test_an_interrupted_experiment_resumes_to_the_numbers_of_an_uninterrupted_one(cli, tmp_path, monkeypatch):
    own_set(tmp_path)
    common = (*SMALL, "--methods", "t-svgp", "svgp", "--data-dir", tmp_path, "--traces", "3")
    assert cli(*common, "--out", tmp_path / "whole") == 0

    class Crash(Exception):
        pass

    class CrashingTrace(uci.Trace):
        def __call__(self, state):
            super().__call__(state)
            if state.epoch_end and state.epoch == 4 and self.measure.args[1] == "bound_base":
                raise Crash

    fit = tighter_gp.fit
    with monkeypatch.context() as patched:
        patched.setattr(uci, "Trace", CrashingTrace)
        patched.setattr(tighter_gp, "fit", lambda *a, **k: fit(*a, **k, checkpoint_every=5))
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
    fit = tighter_gp.fit

    class Crash(Exception):
        pass

    def crash(*args, **kwargs):
        history = fit(*args, **kwargs)
        if "checkpoint" in kwargs:
            raise Crash
        return history

    common = (*SMALL[:-4], "--splits", "0", "--methods", "t-svgp", "--data-dir", tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(tighter_gp, "fit", crash)
        with pytest.raises(Crash):
            cli(*common, "--epochs", "6", "--out", tmp_path / "crashed")
    assert len(list((tmp_path / "crashed" / "checkpoints").iterdir())) == 1
    changed = (*common, "--epochs", "3")
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


@pytest.mark.parametrize("method", ["t-svgp", "t-solve-gp"])
def test_what_a_classifier_leaves_unexplained_is_a_share_and_shrinks_with_certainty(method):
    data = load_digits(dtype=torch.float64, device=torch.device("cpu"))
    start = models.make_start(data.train_x, 16, 0)
    model, likelihood = models.make_classification(method, start, 10, "optimal")
    found = mnist.unexplained(model.double(), likelihood, data)
    assert 0 < found["residual_share"] < 1
    # A softmax over ten classes bends by p (1 - p), at most .25.
    assert 0 < found["curvature_ratio"] < 0.25 * found["residual_share"] * model.covar_module.outputscale.item()
    with torch.no_grad():  # sure of one class
        model.variational_strategy.base_variational_strategy._variational_distribution.variational_mean[0] += 30.0
    assert mnist.unexplained(model, likelihood, data)["curvature_ratio"] < found["curvature_ratio"]


def test_half_of_the_iterations_is_what_half_the_budget_would_give():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 2, dtype=torch.float64, generator=generator)
    y = x[:, 0].sin() + 0.1 * torch.randn(40, dtype=torch.float64, generator=generator)
    data = Split("toy", x, y, x, y, 1.0)

    def train(iterations):
        return blocks.train(blocks.Collapsed(data, x[:6], "tighter", None), data, iterations)

    whole, half = train(12), train(6)
    assert whole.bound_at_half == half.bound < whole.bound
    assert not whole.converged
    assert train(1000).converged
