from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import tighter_gp
from benchmarks import demo, toy
from benchmarks.__main__ import main
from benchmarks.errors import UserError
from benchmarks.runs import read_results
from tests.tools import dense

ROOT = Path(__file__).resolve().parents[2]
SNELSON = Path(os.environ.get("TIGHTER_GP_DATA", ROOT.parent / "shared" / "data")) / "snelson.csv"


@pytest.fixture(scope="module")
def published():
    return {result["method"]: result for result in read_results(demo.PUBLISHED / demo.RESULTS)}


def dense_terms(result, data):
    """Log evidence, log density under the explained part, and d/noise, from the hyperparameters a result states."""
    lengthscale, noise = torch.tensor([result["lengthscale"]]), result["noise_variance"]
    z = torch.tensor(result["inducing_inputs"]).unsqueeze(-1)
    kernel = lambda a, b: dense.rbf(a, b, result["kernel_variance"], lengthscale)
    cross = kernel(z, data.x)
    explained = cross.T @ torch.linalg.inv(kernel(z, z) + demo.JITTER * torch.eye(len(z))) @ cross
    identity = noise * torch.eye(len(data.y))
    covariance = kernel(data.x, data.x)
    ratio = (covariance - explained).diagonal() / noise
    return dense.log_normal(data.y, covariance + identity), dense.log_normal(data.y, explained + identity), ratio


def check_bounds(results, slack):
    """Collapsed bounds are their formulas; uncollapsed ones lie below these by less than ``slack``; all below the evidence."""
    data = toy.make_toy()
    for result in results:
        evidence, explained, ratio = dense_terms(result, data)
        price = torch.log1p(ratio) if result["method"].startswith("T-") else ratio
        collapsed = (explained - 0.5 * price.sum()).item() / len(data.y)
        bound = result["bound_per_datum"]
        if result["method"].endswith("SGPR"):
            assert bound == pytest.approx(collapsed, abs=1e-8)
        assert collapsed - slack < bound < collapsed + 1e-8
        assert bound < result["log_evidence_per_datum"] == pytest.approx(evidence.item() / len(data.y), abs=1e-8)


# -- the data ----------------------------------------------------------------------------------------------------------


def test_toy_data_follow_the_documented_formula():
    data = toy.make_toy()
    assert data.x.shape == (200, 1)
    assert data.test_x.shape == (1000, 1)
    for x, y in ((data.x, data.y), (data.test_x, data.test_y)):
        noise = y - torch.sin(2 * x[:, 0]) - 0.5 * torch.cos(3 * x[:, 0] + 1)
        assert noise.std().item() == pytest.approx(0.1, rel=0.1)
        assert abs(noise.mean().item()) < 0.02
        assert 0 < x.min() < 0.1
        assert 5.9 < x.max() < 6


def test_toy_data_are_the_stream_the_docstring_names():
    random = np.random.RandomState(0)
    x, noise = random.uniform(0, 6, 200), random.standard_normal(200)
    data = toy.make_toy()
    np.testing.assert_array_equal(data.x[:, 0].numpy(), x)
    np.testing.assert_allclose(data.y.numpy(), np.sin(2 * x) + 0.5 * np.cos(3 * x + 1) + 0.1 * noise, rtol=1e-14)


def test_csv_rows_split_and_standardise_with_training_statistics(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("depth,yield\n" + "\n".join(f"{3 * i},{5 - 2 * i}" for i in range(20)) + "\n\n")
    data = toy.read_csv(path, test_fraction=0.25, seed=3, standardise=True)
    assert (data.name, len(data.y), len(data.test_y), data.held_out) == ("mine", 15, 5, True)
    assert data.x.mean().item() == pytest.approx(0, abs=1e-12)
    assert data.y.std().item() == pytest.approx(1)
    assert abs(data.test_y.std().item() - 1) > 1e-6
    torch.testing.assert_close(data.y, -data.x[:, 0])
    plain = toy.read_csv(path)
    assert (len(plain.y), len(plain.test_y), plain.held_out) == (20, 20, False)


# -- training ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch):
    """What SVGP and T-SVGP ask of ``fit``: the state of the model, and the arguments."""
    found = []

    def note(model, likelihood, x, y, **kwargs):
        found.append(({name: value.clone() for name, value in model.state_dict().items()}, kwargs))
        return tighter_gp.training.History()

    data = toy.make_toy()
    monkeypatch.setattr(tighter_gp, "fit", note)
    for method in ("SVGP", "T-SVGP"):
        choice = demo.METHODS[method][1]
        demo.train_uncollapsed(choice, data, demo.inducing_quantiles(data.x, 5), demo.Budget(), 1, lambda *_: None)
    return found


def test_svgp_and_tighter_svgp_start_equal(asked):
    (first, _), (second, _) = asked
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_svgp_and_tighter_svgp_see_the_same_mini_batches_at_the_same_rates(asked):
    (_, first), (_, second) = asked
    assert first["seed"] == 1
    assert first.keys() == second.keys()
    assert {name for name in first if first[name] != second[name]} == {"objective", "callbacks"}


def test_training_leaves_the_global_random_state_alone():
    data, state = toy.make_toy(), torch.get_rng_state()
    z = demo.inducing_quantiles(data.x, 4)
    demo.train_uncollapsed(demo.METHODS["T-SVGP"][1], data, z, demo.SMOKE, 0, lambda *_: None)
    assert torch.equal(state, torch.get_rng_state())


def test_lbfgs_comes_back_from_a_point_where_nothing_can_be_computed(monkeypatch):
    data, calls, done = toy.make_toy(), itertools.count(), []
    forward = demo.CollapsedGP.forward

    def failing(self, x):
        if torch.is_grad_enabled() and next(calls) in (5, 6):
            raise demo.NanError("left the domain")
        return forward(self, x)

    z = demo.inducing_quantiles(data.x, 5)
    undisturbed = demo.train_collapsed("tighter", data, z, demo.Budget(), 0, lambda *_: None)
    monkeypatch.setattr(demo.CollapsedGP, "forward", failing)
    fit = demo.train_collapsed("tighter", data, z, demo.Budget(), 0, lambda steps, _: done.append(steps))
    assert next(calls) > 7
    assert fit.bound == pytest.approx(undisturbed.bound, abs=1e-4)
    assert fit.bound >= max(value for _, value in fit.trace) - 1e-12
    assert sum(done) == demo.Budget().iterations


def test_snelson_bounds_are_the_papers():
    if not SNELSON.exists():
        pytest.skip("snelson.csv not found; point TIGHTER_GP_DATA at the folder that holds it")
    data = toy.read_csv(SNELSON)
    z = demo.inducing_quantiles(data.x, 5)
    for bound, expected in (("titsias", (-0.5589, 0.0868, 0.1263)), ("tighter", (-0.5253, 0.1073, 0.1155))):
        fit = demo.train_collapsed(bound, data, z, demo.Budget(), 0, lambda *_: None)
        learnt = (fit.bound, fit.model.base_kernel.outputscale.item(), fit.model.likelihood.noise.item())
        assert learnt == pytest.approx(expected, abs=5e-4)


# -- the whole run -----------------------------------------------------------------------------------------------------


def test_smoke_run_writes_table_results_and_figure(tmp_path, capsys):
    out = tmp_path / "new" / "folder"
    assert main(["demo", "--smoke", "--out", str(out)]) == 0
    printed, err = capsys.readouterr()
    assert err == ""  # no progress bar where there is no terminal
    results = read_results(out / demo.RESULTS)
    assert [result["method"] for result in results] == ["SGPR", "T-SGPR", "SVGP", "T-SVGP"]
    assert demo.table(results) in printed
    assert (out / demo.FIGURE).read_bytes().startswith(b"\x89PNG")
    check_bounds(results, slack=1.0)
    for result in results:
        assert all(math.isfinite(value) for value in result.values() if isinstance(value, float))
        assert result["config"]["steps"] == demo.SMOKE.steps


def test_reported_errors_and_densities_are_those_of_the_test_points(tmp_path):
    path = tmp_path / "line.csv"
    path.write_text("\n".join(f"{i / 7},{math.sin(i / 7) + 0.1 * (-1) ** i}" for i in range(31)))
    data = toy.read_csv(path, test_fraction=0.3)
    fit = demo.train_collapsed("tighter", data, demo.inducing_quantiles(data.x, 4), demo.SMOKE, 0, lambda *_: None)
    result = demo.describe(fit, data)
    variance, lengthscale, noise = (
        result["kernel_variance"],
        torch.tensor([result["lengthscale"]]),
        result["noise_variance"],
    )
    z = torch.tensor(result["inducing_inputs"]).unsqueeze(-1)
    inducing = dense.rbf(z, z, variance, lengthscale) + demo.JITTER * torch.eye(len(z))
    train, test = (dense.rbf(z, x, variance, lengthscale) for x in (data.x, data.test_x))
    posterior = torch.linalg.inv(inducing + train @ train.T / noise)
    mean = test.T @ posterior @ train @ data.y / noise
    stddev = (variance + (test * ((posterior - torch.linalg.inv(inducing)) @ test)).sum(0) + noise).sqrt()
    log_density = torch.distributions.Normal(mean, stddev).log_prob(data.test_y)
    assert result["mean_nlpd"] == pytest.approx(-log_density.mean().item(), rel=1e-8)
    assert result["rmse"] == pytest.approx((mean - data.test_y).pow(2).mean().item() ** 0.5, rel=1e-8)


def test_command_runs_on_a_csv_file_with_held_out_rows(tmp_path, capsys):
    path = tmp_path / "mine.csv"
    path.write_text("\n".join(f"{i / 7},{1000 * math.sin(i / 7)}" for i in range(31)))
    assert main(["demo", "--smoke", "--out", str(tmp_path), "--data", str(path), "--test-fraction", "0.2"]) == 0
    printed = capsys.readouterr().out
    assert "--standardise" in printed
    assert "on 6 test points" in " ".join(printed.split())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file"),
        ("1,2\n3,four\n", "line 2.*two numbers"),
        ("1,2\n3,4,5\n", "line 2.*two numbers"),
        ("1,2\n3,nan\n", "line 2.*NaN or infinite"),
        ("x,y\n1,2\n", "10 to 5000 rows; got 1"),
        ("", "10 to 5000 rows; got 0"),
        ("1,2\n" * 12, "different inputs"),
    ],
)
def test_bad_data_is_one_line_and_exit_code_2(tmp_path, capsys, text, message):
    path = tmp_path / "bad.csv"
    if text is not None:
        path.write_text(text)
    assert main(["demo", "--smoke", "--out", str(tmp_path / "out"), "--data", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert err.startswith(f"error: cannot read {path}" if text is None else f"error: {path}")
    with pytest.raises(UserError, match=message):
        demo.load_data(_options(path))


@pytest.mark.parametrize("options", [["--num-inducing", "0"], ["--seed", "-1"], ["--test-fraction", "1"]])
def test_bad_options_are_one_line_and_exit_code_2(tmp_path, capsys, options):
    assert main(["demo", "--smoke", "--out", str(tmp_path), *options]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_binary_file_and_unwritable_folder_are_refused(tmp_path, capsys):
    path = tmp_path / "figure.png"
    path.write_bytes(b"\x89PNG\xff\xfe")
    assert main(["demo", "--smoke", "--out", str(tmp_path), "--data", str(path)]) == 2
    assert "not a text file" in capsys.readouterr().err
    assert main(["demo", "--smoke", "--out", str(path)]) == 2
    assert "cannot write to" in capsys.readouterr().err


def test_the_module_command_reports_bad_input(tmp_path):
    command = [sys.executable, "-m", "benchmarks", "demo", "--data", str(tmp_path / "absent.csv")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [f"error: cannot read {tmp_path / 'absent.csv'}: No such file or directory."]


# -- what the README shows ---------------------------------------------------------------------------------------------


def test_published_results_are_a_full_run_on_the_toy_data(published):
    assert list(published) == list(demo.METHODS)
    for result in published.values():
        assert result["config"] == json.loads(json.dumps(demo.Budget()._asdict()))
        assert (result["dataset"], result["num_data"], result["num_test"]) == ("toy", 200, 1000)


def test_published_bounds_are_their_formulas_and_below_the_exact_evidence(published):
    check_bounds(published.values(), slack=1e-3)


def test_published_tighter_methods_have_the_higher_bound_and_the_lower_noise(published):
    for method in ("SGPR", "SVGP"):
        standard, tighter = published[method], published[f"T-{method}"]
        assert tighter["bound_per_datum"] > standard["bound_per_datum"] + 0.05
        assert 0.01 < tighter["noise_variance"] < standard["noise_variance"]


def _options(path):
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return parser.parse_args(["--data", str(path)])
