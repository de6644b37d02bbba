"""The compiled step: one graph, the numbers of the eager step, nothing read back, no update from a failed step."""

from __future__ import annotations

import copy
import dataclasses
import shutil
import warnings

import gpytorch
import pytest
import torch

import tighter_gp
from tests.test_device import CASES, Softmax, build
from tighter_gp.training import NaturalGradients
from tighter_gp.training.natural_compiled import CompiledNaturalStep

# Captures the same graph as the default backend without compiling C++.
EAGER = {"backend": "eager"}


def make(case="optimal", dtype=torch.float64, **options):
    arguments, likelihood = CASES[case]
    torch.manual_seed(0)
    model, likelihood = build(**arguments).to(dtype), likelihood().to(dtype)
    x, y = torch.randn(7, 3, dtype=dtype), torch.ones(*arguments.get("batch", ()), 7, dtype=dtype)
    model.train()
    mll = tighter_gp.TighterELBO(likelihood, model, num_data=100)
    mll(model(x), y)  # initialises q(u)
    return mll, x, y


def parameters(mll):
    return dict(mll.named_parameters())


def gradients(mll):
    return {name: parameter.grad.clone() for name, parameter in parameters(mll).items()}


def check_against_eager(case, rtol, dtype=torch.float64, **options):
    mll, x, y = make(case, dtype)
    loss = -mll(mll.model(x), y)
    loss.sum().backward()
    expected = gradients(mll)
    mll.zero_grad()
    step = tighter_gp.CompiledStep(mll, **options)
    torch.testing.assert_close(step(x, y), loss.detach(), rtol=rtol, atol=rtol)
    for name, gradient in gradients(mll).items():
        scale = expected[name].abs().max().item()
        torch.testing.assert_close(gradient, expected[name], rtol=0, atol=rtol * max(scale, 1e-3), msg=name)
    assert step.is_compiled


@pytest.mark.parametrize("case", [name for name in CASES if name != "tril-natural"])
def test_captured_step_has_the_numbers_of_the_eager_one(case):
    check_against_eager(case, 1e-9, **EAGER)


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++", "cl"))), reason="no C++ compiler for torch.compile")
def test_compiled_step_has_the_numbers_of_the_eager_one_in_float32():
    check_against_eager("optimal", 2e-5, torch.float32)


def test_step_with_a_fused_optimizer_reads_nothing_back(monkeypatch):
    """Inside the graph nothing can be read (fullgraph); around it this watches every way in which Python can read a value."""
    mll, x, y = make()
    optimizer = torch.optim.Adam(mll.parameters(), lr=0.01, fused=True)
    step = tighter_gp.CompiledStep(mll, optimizer, **EAGER)
    step(x, y)
    reads = []
    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "numpy"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda *args, o=original, n=name, **kw: reads.append(n) or o(*args, **kw)
        )
    step(x, y)
    assert reads == []


@pytest.mark.parametrize("fused", [True, False])
def test_steps_are_those_of_the_eager_optimizer(fused):
    mll, x, y = make()
    eager, eager_x = copy.deepcopy(mll), x
    optimizer = torch.optim.Adam(mll.parameters(), lr=0.01, fused=fused)
    step = tighter_gp.CompiledStep(mll, optimizer, **EAGER)
    reference = torch.optim.Adam(eager.parameters(), lr=0.01)
    for _ in range(3):
        step(x, y)
        reference.zero_grad()
        (-eager(eager.model(eager_x), y)).backward()
        reference.step()
    for name, parameter in parameters(mll).items():
        torch.testing.assert_close(parameter, parameters(eager)[name], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("fused", [True, False])
def test_a_failed_step_leaves_parameters_and_optimizer_alone(fused):
    mll, x, y = make()
    optimizer = torch.optim.Adam(mll.parameters(), lr=0.01, fused=fused)
    step = tighter_gp.CompiledStep(mll, optimizer, **EAGER)
    step(x, y)
    before = {name: parameter.detach().clone() for name, parameter in parameters(mll).items()}
    moments = [state["exp_avg"].clone() for state in optimizer.state.values()]
    assert step.failed.item() == 0
    step(x, torch.full_like(y, torch.nan))
    assert step.failed.item() == 1
    for name, parameter in parameters(mll).items():
        torch.testing.assert_close(parameter, before[name], rtol=0, atol=0)
    for state, known in zip(optimizer.state.values(), moments, strict=True):
        torch.testing.assert_close(state["exp_avg"], known, rtol=0, atol=0)
    for parameter in mll.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()  # the user's own is none of a step that failed
    assert all((parameter != before[name]).any() for name, parameter in parameters(mll).items())
    step(x, y)
    assert step.failed.item() == 1


def test_a_smaller_last_batch_is_captured_too():
    mll, x, y = make()
    step = tighter_gp.CompiledStep(mll, **EAGER)
    step(x, y)
    torch.testing.assert_close(step(x[:3], y[:3]), -mll(mll.model(x[:3]), y[:3]).detach(), rtol=1e-9, atol=1e-9)


def test_changed_hyperparameters_are_seen():
    mll, x, y = make()
    step = tighter_gp.CompiledStep(mll, **EAGER)
    step(x, y)
    mll.model.covar_module.outputscale = 3.0
    mll.likelihood.noise = 0.2
    torch.testing.assert_close(step(x, y), -mll(mll.model(x), y).detach(), rtol=1e-9, atol=1e-9)


def test_priors_count():
    mll, x, y = make()
    gamma, log_normal = gpytorch.priors.GammaPrior(2.0, 3.0), gpytorch.priors.LogNormalPrior(0.0, 1.0)
    validates = [distribution._validate_args for distribution in (gamma, log_normal, log_normal.base_dist)]
    mll.model.covar_module.register_prior("scale_prior", gamma, lambda module: module.outputscale)
    mll.likelihood.register_prior("noise_prior", log_normal, lambda module: module.noise)
    step = tighter_gp.CompiledStep(mll, **EAGER)
    torch.testing.assert_close(step(x, y), -mll(mll.model(x), y).detach(), rtol=1e-9, atol=1e-9)
    assert step.is_compiled
    assert [d._validate_args for d in (gamma, log_normal, log_normal.base_dist)] == validates


def test_a_softmax_over_several_functions_is_captured():
    torch.manual_seed(0)
    mll = tighter_gp.TighterELBO(gpytorch.likelihoods.SoftmaxLikelihood(3, 3), Softmax().train(), num_data=100)
    x, y = torch.randn(7, 3), torch.arange(7) % 3
    step = tighter_gp.CompiledStep(mll, **EAGER)
    with gpytorch.settings.num_likelihood_samples(20_000):
        loss, eager = step(x, y), -mll(mll.model(x), y).detach()
    assert step.is_compiled
    torch.testing.assert_close(loss, eager, rtol=0, atol=0.01)


def test_a_mistake_in_the_call_is_an_error_and_not_a_reason_to_fall_back():
    mll, x, y = make()
    step = tighter_gp.CompiledStep(mll, **EAGER)
    with pytest.raises(ValueError, match="Targets must have shape"):
        step(x, y[:3])


@pytest.mark.parametrize("which", [0, 1])
def test_a_batch_that_wants_a_gradient_is_refused(which):
    """It would get none, and what computes it would not be trained."""
    mll, *batch = make()
    batch[which] = 1 * batch[which].requires_grad_()
    with pytest.raises(
        ValueError, match=f"^{['x', 'target'][which]} requires a gradient.*put what computes it into the model"
    ):
        tighter_gp.CompiledStep(mll, **EAGER)(*batch)


def unusual(mll):
    """A model whose kernel asks GPyTorch's way, which reads values."""
    mll.model.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.PeriodicKernel())
    return mll


@pytest.mark.parametrize("fused", [True, False])
def test_what_cannot_be_captured_runs_eagerly_and_says_why(fused):
    mll, x, y = make()
    mll = unusual(mll)
    step = tighter_gp.CompiledStep(mll, torch.optim.Adam(mll.parameters(), lr=0.01, fused=fused), **EAGER)
    expected = -mll(mll.model(x), y).detach()
    with pytest.warns(RuntimeWarning, match=r"not compiled: .*\(in .*\.py:\d+\)"):
        loss = step(x, y)
    assert not step.is_compiled
    torch.testing.assert_close(loss, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert step(x, y) < loss


def test_an_eager_step_that_fails_leaves_the_parameters_alone(monkeypatch):
    mll, x, y = make()
    mll = unusual(mll)
    step = tighter_gp.CompiledStep(mll, torch.optim.Adam(mll.parameters(), lr=0.01), **EAGER)
    with pytest.warns(RuntimeWarning):
        step(x, y)
    before = {name: parameter.detach().clone() for name, parameter in parameters(mll).items()}

    def fail(*args, **kwargs):
        raise torch.linalg.LinAlgError("not positive definite")

    monkeypatch.setattr(step._loss, "forward", fail)
    assert step(x, y).isnan()
    assert step.failed.item() == 1
    for name, parameter in parameters(mll).items():
        torch.testing.assert_close(parameter, before[name], rtol=0, atol=0)


def test_a_first_step_that_fails_leaves_the_parameters_alone_and_the_next_is_captured(monkeypatch):
    mll, x, y = make()
    step = tighter_gp.CompiledStep(mll, torch.optim.Adam(mll.parameters(), lr=0.01), **EAGER)
    before = {name: parameter.detach().clone() for name, parameter in parameters(mll).items()}

    def fail(*args, **kwargs):
        raise torch.linalg.LinAlgError("not positive definite")

    with monkeypatch.context() as patch:
        patch.setattr(step._loss, "forward", fail)
        assert step(x, y).isnan()
        assert step.failed.item() == 1
    for name, parameter in parameters(mll).items():
        torch.testing.assert_close(parameter, before[name], rtol=0, atol=0)
    assert step(x, y).isfinite()
    assert step.is_compiled
    assert step.failed.item() == 1


class RootMean(gpytorch.means.Mean):
    """Finite at zero, where its slope is not."""

    def __init__(self):
        super().__init__()
        self.height = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return self.height.abs().sqrt().expand(x.shape[:-1])


@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_gradient_that_is_not_finite_never_reaches_the_parameters(is_compiled, monkeypatch):
    mll, x, y = make()
    mll.model.mean_module = RootMean()
    before = {name: parameter.detach().clone() for name, parameter in parameters(mll).items()}
    step = tighter_gp.CompiledStep(mll, torch.optim.Adam(mll.parameters(), lr=0.01), **EAGER)
    if not is_compiled:
        monkeypatch.setattr(step, "_capture", lambda *args: None)
    assert step(x, y).isnan()
    assert step.is_compiled == is_compiled
    assert step.failed.item() == 1
    for name, parameter in parameters(mll).items():
        torch.testing.assert_close(parameter, before[name], rtol=0, atol=0)


CHANGES = {
    "jitter": lambda mll: setattr(mll.model.variational_strategy, "jitter_val", 0.1),
    "function": lambda mll: setattr(mll.model.mean_module, "warp", torch.exp),
    "method": lambda mll: setattr(mll.model.mean_module, "forward", lambda x: x.sum(-1)),
    "dimensions in place": lambda mll: mll.model.covar_module.active_dims.copy_(torch.tensor([2, 0])),
    "dimensions by numpy": lambda mll: mll.model.covar_module.active_dims.numpy().__setitem__(slice(None), [2, 0]),
    "private list": lambda mll: mll.model.mean_module._weights.reverse(),
    "object replaced": lambda mll: setattr(mll.model.mean_module, "scale", Scale(3.0)),
    "dataclass replaced": lambda mll: setattr(mll.model.mean_module, "shift", Shift(3.0)),
    "dataclass in place": lambda mll: setattr(mll.model.mean_module.shift, "value", 3.0),
}


class Scale:
    def __init__(self, value):
        self.value = value


@dataclasses.dataclass
class Shift:
    value: float


class Warped(gpytorch.means.Mean):
    def __init__(self):
        super().__init__()
        self.warp, self._weights, self.scale, self.shift = torch.sin, [0.5, 1.0, 2.0], Scale(1.0), Shift(0.0)

    def forward(self, x):
        total = sum(weight * column for weight, column in zip(self._weights, x.unbind(-1), strict=True))
        return self.warp(self.scale.value * total) + self.shift.value


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_constant_makes_another_graph(change):
    mll, x, y = make()
    mll.likelihood = gpytorch.likelihoods.FixedNoiseGaussianLikelihood(torch.full((7,), 0.5))
    mll.model.mean_module = Warped()
    mll.model.covar_module = gpytorch.kernels.MaternKernel(active_dims=(0, 1), ard_num_dims=2)
    mll.model.covar_module.lengthscale = torch.tensor([0.5, 2.0])
    step = tighter_gp.CompiledStep(mll, **EAGER)
    first = step(x, y)
    CHANGES[change](mll)
    second = step(x, y)
    assert step.is_compiled
    assert (second - first).abs() > 1e-3
    torch.testing.assert_close(second, -mll(mll.model(x), y).detach())
    step(x, y)
    assert len(step._graphs) == 2  # nothing else made another


CHANGES_OF_NOISE = {
    "replaced": lambda likelihood: setattr(likelihood, "noise", torch.full((7,), 2.0)),
    "in place": lambda likelihood: likelihood.noise_covar.noise.fill_(2.0),
    "data": lambda likelihood: likelihood.noise_covar.noise.data.mul_(4.0),
    "numpy": lambda likelihood: likelihood.noise_covar.noise.numpy().fill(2.0),
}


@pytest.mark.parametrize("change", CHANGES_OF_NOISE)
def test_a_changed_tensor_that_is_no_buffer_is_seen_by_the_same_graph(change):
    mll, x, y = make()
    mll.likelihood = gpytorch.likelihoods.FixedNoiseGaussianLikelihood(torch.full((7,), 0.5))
    step = tighter_gp.CompiledStep(mll, **EAGER)
    first = step(x, y)
    CHANGES_OF_NOISE[change](mll.likelihood)
    second, found = step(x, y), gradients(mll)
    assert step.is_compiled
    assert (second - first).abs() > 1e-3
    mll.zero_grad()
    expected = -mll(mll.model(x), y)
    expected.backward()
    torch.testing.assert_close(second, expected.detach())
    for name, gradient in gradients(mll).items():
        torch.testing.assert_close(found[name], gradient, msg=name)
    assert len(step._graphs) == 1


def test_tables_with_sparse_gradients_run_eagerly():
    torch.manual_seed(0)
    model = build(conditional=tighter_gp.PerPoint(9)).train()
    mll = tighter_gp.TighterELBO(gpytorch.likelihoods.GaussianLikelihood(), model, num_data=9)
    step = tighter_gp.CompiledStep(mll, **EAGER)
    with pytest.warns(RuntimeWarning, match="not compiled"):
        step(torch.randn(4, 3), torch.randn(4), index=torch.tensor([1, 0, 5, 8]))
    assert model.variational_strategy.conditional.raw_m.grad.is_sparse


# ---------------------------------------------------------------------------------------------------------------------
# The user's modules are theirs
# ---------------------------------------------------------------------------------------------------------------------


def test_a_likelihood_that_is_also_part_of_the_model_is_trained():
    mll, x, y = make()
    mll.model.likelihood = mll.likelihood
    twin = copy.deepcopy(mll)
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.1) for each in (mll, twin)]
    step = tighter_gp.CompiledStep(mll, optimizers[0], **EAGER)
    for _ in range(3):
        step(x, y)
        optimizers[1].zero_grad()
        (-twin(twin.model(x), y)).backward()
        optimizers[1].step()
    assert step.is_compiled
    assert isinstance(mll.likelihood.raw_noise, torch.nn.Parameter)
    for (name, parameter), other in zip(mll.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter, other, rtol=1e-8, atol=1e-8, msg=name)


def test_a_parameter_that_is_frozen_later_stays_where_it_is():
    mll, x, y = make()
    step = tighter_gp.CompiledStep(mll, torch.optim.Adam(mll.parameters(), lr=0.1), **EAGER)
    step(x, y)
    frozen = mll.likelihood.raw_noise.requires_grad_(False)
    before = frozen.detach().clone()
    for _ in range(2):
        step(x, y)
    assert frozen.grad is None
    torch.testing.assert_close(frozen, before, rtol=0, atol=0)


class Extractor(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self._shift = torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.ones(3)

    def forward(self, x):
        return self.norm(self.linear(x)) + self._shift


class Deep(gpytorch.models.ApproximateGP):
    def __init__(self):
        points = torch.randn(5, 3)
        q = gpytorch.variational.CholeskyVariationalDistribution(5)
        super().__init__(tighter_gp.TighterVariationalStrategy(self, points, q))
        self.mean_module, self.covar_module = gpytorch.means.ConstantMean(), gpytorch.kernels.RBFKernel()
        self.extractor = Extractor()

    def forward(self, x):
        x = self.extractor(x)
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def with_extractor():
    torch.manual_seed(0)
    model, x, y = Deep(), torch.randn(7, 3), torch.randn(7)
    model.eval()(x)  # initialises q(u)
    return tighter_gp.TighterELBO(gpytorch.likelihoods.GaussianLikelihood(), model.train(), num_data=100), x, y


def test_modes_are_kept_and_statistics_are_not_updated_by_a_capture():
    mll, x, y = with_extractor()
    norm = mll.model.extractor.norm.eval()
    before = norm.running_mean.clone()
    step = tighter_gp.CompiledStep(mll, **EAGER)
    loss = step(x, y)
    assert not norm.training
    assert torch.equal(norm.running_mean, before)
    torch.testing.assert_close(loss, -mll(mll.model(x), y).detach(), rtol=1e-10, atol=0)


def test_a_step_that_updates_statistics_runs_eagerly_and_updates_them_once():
    mll, x, y = with_extractor()
    twin = copy.deepcopy(mll.model.extractor)
    step = tighter_gp.CompiledStep(mll, **EAGER)
    with pytest.warns(RuntimeWarning, match="not compiled: a step changes the buffers"):
        step(x, y)
    twin(torch.cat([mll.model.variational_strategy.inducing_points.detach(), x]))
    torch.testing.assert_close(mll.model.extractor.norm.running_mean, twin.norm.running_mean, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("how", ["assign", "replace"])
def test_a_replaced_parameter_is_the_one_that_is_used(how):
    mll, x, y = make()
    step = tighter_gp.CompiledStep(mll, **EAGER)
    step(x, y)
    if how == "assign":
        state = {name: value + 0.3 if value.is_floating_point() else value for name, value in mll.state_dict().items()}
        mll.load_state_dict(state, assign=True)
    else:
        mll.model.mean_module.raw_constant = torch.nn.Parameter(torch.tensor(2.0))
    torch.testing.assert_close(step(x, y), -mll(mll.model(x), y).detach(), rtol=1e-9, atol=0)
    assert all(parameter.grad is not None for parameter in mll.parameters())


def reusing(graph, inputs):
    """A backend that writes its results to the same memory each time, as CUDA graphs do."""
    memory = []

    def run(*args):
        results = graph.forward(*args)
        if not memory:
            memory.extend(result.clone() for result in results)
        for kept, result in zip(memory, results, strict=True):
            kept.copy_(result)
        return tuple(memory)

    return run


def test_results_outlive_the_memory_of_cuda_graphs():
    """What mode="reduce-overhead" does: the next step writes over what this one returned."""
    mll, x, y = make()
    step = tighter_gp.CompiledStep(mll, backend=reusing)
    first, found = step(x, y), gradients(mll)
    kept = {name: parameter.grad for name, parameter in parameters(mll).items()}
    value = first.clone()
    second = step(x, y + 1)
    assert step.is_compiled
    assert first == value != second
    assert int(step.failed) == 0
    for name, gradient in kept.items():
        assert torch.equal(gradient, found[name])
    assert any(not torch.equal(parameter.grad, found[name]) for name, parameter in parameters(mll).items())


def test_natural_parameters_outlive_the_memory_of_cuda_graphs():
    """They go in and out of the graph, and the step before the last must still be there to return to."""
    runs = []
    for backend in ("eager", reusing):
        mll, x, y = make()
        natural = NaturalGradients(mll.model, num_data=100)
        step = CompiledNaturalStep(mll, natural, backend=backend)
        losses = [float(step(x, y)) for _ in range(3)]
        before = [parameter.detach().clone() for parameter in natural.parameters]
        step(x, y)
        natural.undo()
        assert all(map(torch.equal, before, natural.parameters))
        losses.append(float(step(x, y)))
        assert step.is_compiled
        runs.append(losses)
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == 4


def test_a_setting_that_is_a_list_makes_another_graph():
    mll, x, y = with_extractor()
    extractor = mll.model.extractor
    extractor.norm, extractor.shifts = torch.nn.Identity(), [0.0]
    extractor.forward = lambda inputs: extractor.linear(inputs) + extractor.shifts[0]
    step = tighter_gp.CompiledStep(mll, **EAGER)
    mll.model.covar_module = gpytorch.kernels.LinearKernel()  # which knows where zero is
    first = step(x, y)
    extractor.shifts[0] = 2.0
    assert (step(x, y) - first).abs() > 1e-3
    torch.testing.assert_close(step(x, y), -mll(mll.model(x), y).detach(), rtol=1e-9, atol=0)
