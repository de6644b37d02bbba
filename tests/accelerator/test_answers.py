"""Everything but training: predictions, diagnoses, inducing points, latents. Equal numbers, results on the device."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import tighter_gp
from tests.accelerator.device import DEVICES
from tests.accelerator.features import FEATURES, B, D, M, N, collapsed_gp, collapsed_kernel, kernel
from tests.accelerator.table import step_of

pytestmark = pytest.mark.accelerator

TARGETS = {
    "T-SVGP": "real",
    "T-SVGP, beta": "real",
    "PerPoint": "real",
    "Blocks": "real",
    "SOLVE-GP": "real",
    "Bernoulli, optimal": "binary",
    "Poisson, scalar": "count",
    "softmax, optimal": "class",
    "multitask": "tasks",
    "LMC": "tasks",
    "mean-field q(u)": "real",
    "delta q(u)": "real",
    "natural q(u)": "real",
}
SINGLE = [name for name, target in TARGETS.items() if target not in ("class", "tasks")]
GAUSSIAN = [name for name, target in TARGETS.items() if target == "real"]


def inputs(device, size=7):
    return torch.randn(size, D, generator=torch.Generator("cpu").manual_seed(9), device="cpu").to(device)


def targets(kind, device, size=N):
    y = torch.randn(size, 3, generator=torch.Generator("cpu").manual_seed(8), device="cpu")
    made = {
        "real": y[:, 0],
        "binary": (y[:, 0] > 0).to(y),
        "count": y[:, 0].exp().round(),
        "class": y.argmax(-1),
        "tasks": y,
    }
    return made[kind].to(device)


def trained(feature, device):
    step = step_of(feature, device)
    torch.manual_seed(1)
    return step.module.model, step.module.likelihood


def assert_equal_everywhere(answer, default_device=None):
    """``answer(device)`` gives tensors and numbers; those of the devices are there, and are the CPU's."""
    expected = torch.utils._pytree.tree_leaves(answer("cpu"))
    assert expected
    for device in (*DEVICES, *(["cpu"] if default_device else [])):
        torch.set_default_device(default_device)
        try:
            actual = torch.utils._pytree.tree_leaves(answer(device))
        finally:
            torch.set_default_device(None)
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            if isinstance(other, torch.Tensor):
                assert one.device == torch.device(device)
                torch.testing.assert_close(one.cpu(), other, rtol=1e-10, atol=1e-12, equal_nan=True)
            else:
                assert one == pytest.approx(other, rel=1e-10, nan_ok=True)


@pytest.mark.parametrize("feature", SINGLE)
def test_predict(feature):
    def answer(device):
        model, likelihood = trained(feature, device)
        q = tighter_gp.predict(model, inputs(device))
        found = [q.mean, q.variance]
        if feature in GAUSSIAN and feature != "Blocks":
            kwargs = {"likelihood": likelihood, "train_x": inputs(device, N)}
            found += [tighter_gp.predict(model, inputs(device), last_term="exact", **kwargs).variance]
        return found

    assert_equal_everywhere(answer)


@pytest.mark.parametrize("feature", TARGETS)
def test_a_call_in_eval_mode(feature):
    def answer(device):
        model, _ = trained(feature, device)
        with torch.no_grad():
            q = model.eval()(inputs(device))
            torch.manual_seed(2)
            return q.mean, q.variance, q.covariance_matrix, q.rsample(torch.Size([2]))

    assert_equal_everywhere(answer)


@pytest.mark.parametrize("default_device", [None, "dev:1"])
@pytest.mark.parametrize("feature", TARGETS)
def test_predict_y(feature, default_device):
    kind = TARGETS[feature]

    def answer(device):
        model, likelihood = trained(feature, device)
        q = tighter_gp.predict_y(model, likelihood, inputs(device))
        torch.manual_seed(2)
        found = [q.mean, q.variance, q.log_prob(targets(kind, device, 7)), q.sample(3)]
        if kind in ("real", "count", "tasks"):
            found += [*q.interval(0.9), q.quantile(0.3)]
        return found

    assert_equal_everywhere(answer, default_device)


@pytest.mark.parametrize("feature", TARGETS)
def test_evaluate_bound(feature):
    def answer(device):
        model, likelihood = trained(feature, device)
        x, y = inputs(device, N), targets(TARGETS[feature], device)
        torch.manual_seed(2)
        return tighter_gp.evaluate_bound(model, likelihood, x, y, batch_size=16)

    assert_equal_everywhere(answer)


@pytest.mark.parametrize("feature", GAUSSIAN)
def test_set_optimal_q_and_diagnose(feature):
    def answer(device):
        model, likelihood = trained(feature, device)
        x, y = inputs(device, N), targets("real", device)
        tighter_gp.set_optimal_q(model, likelihood, x, y)
        diagnosis = tighter_gp.diagnose(model, likelihood, x, y)
        numbers = [v for v in dataclasses.asdict(diagnosis).values() if isinstance(v, float)]
        return dict(model.state_dict()), numbers

    assert_equal_everywhere(answer)


@pytest.mark.parametrize("make", [collapsed_gp, collapsed_kernel])
def test_collapsed_models_predict(make):
    def answer(device):
        torch.manual_seed(0)
        module = make().to(device).module.eval()
        with torch.no_grad():
            q = module.predict(inputs(device)) if hasattr(module, "predict") else module.model(inputs(device))
        return q.mean, q.variance

    assert_equal_everywhere(answer)


@pytest.mark.parametrize("method", ["kmeans", "greedy", "random"])
@pytest.mark.parametrize("default_device", [None, "dev:1"])
def test_inducing_points(method, default_device):
    def answer(device):
        x = inputs(device, N)
        points = tighter_gp.inducing.allocate(x, 6, method, kernel=kernel().to(device))
        return points, tighter_gp.inducing.median_lengthscale(x), tighter_gp.blocks.partition(x, 5)

    assert_equal_everywhere(answer, default_device)


@pytest.mark.parametrize("default_device", [None, "dev:1"])
@pytest.mark.parametrize("where", [None, "cpu", "dev:0"])
def test_batches_of_blocks_are_drawn_by_any_generator(default_device, where):
    labels = torch.arange(N) // 4
    draws = lambda generator: list(tighter_gp.blocks.BlockBatchSampler(labels, 3, generator=generator))
    torch.manual_seed(0)
    expected = draws(where and torch.Generator("cpu").manual_seed(2))
    torch.manual_seed(0)
    torch.set_default_device(default_device)
    try:
        assert draws(where and torch.Generator(where).manual_seed(2)) == expected
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("feature", FEATURES)
def test_the_default_device_changes_no_step(feature):
    expected = step_of(feature, "cpu").gradients()
    for device in ("cpu", "dev:0"):
        step = step_of(feature, device)
        torch.set_default_device("dev:1")
        try:
            actual = step.gradients()
        finally:
            torch.set_default_device(None)
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["Regression", "MultiClassification"])
def test_ready_made_models_live_where_their_data_do(name):
    def answer(device):
        x = inputs(device, N)
        several = [3] if name == "MultiClassification" else []
        model = getattr(tighter_gp.models, name)(*several, x, num_inducing=M)
        assert all(parameter.device == x.device for parameter in model.parameters())
        torch.manual_seed(0)
        model.train()(x[:B])
        return dict(model.state_dict())

    assert_equal_everywhere(answer)
