"""State of every kind of model: copies, checkpoints, moves, and caches that never go stale.

What is special to one class is tested beside it; here is what all of them promise.
"""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import gpytorch
import pytest
import torch
from gpytorch.variational import CholeskyVariationalDistribution, VariationalStrategy

import tighter_gp
from tests.tools import factories
from tests.tools.factories import GP, make_kernel, make_noise
from tighter_gp.gplvm import BayesianGPLVM, LatentVariableELBO, VariationalLatents

N, M, D = 23, 5, 2


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, X_TEST = draw(N, D, seed=1), draw(7, D, seed=2)
Y = torch.sin(2 * X[:, 0]) + 0.1 * draw(N, seed=3)
Z = draw(M, D, seed=4)


class Kind(torch.nn.Module):
    """A model with its likelihood, its loss and its predictions."""

    def __init__(self, seed: int = 0):
        super().__init__()
        self.likelihood = make_noise(0.2 + 0.1 * seed)
        self.model = self.make(make_kernel("rbf", 1.0 + 0.1 * seed, torch.tensor([0.9, 1.3])), Z + 0.1 * seed)

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def data(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        return [tensor.to(self.dtype) for tensor in tensors]

    def restore_data(self) -> None:
        """Put back what a state dict does not hold."""
        buffers, saved = dict(self.named_buffers()), self.state_dict()
        for name, value in type(self)().named_buffers():
            if name not in saved:
                buffers[name].copy_(value)


class TSVGP(Kind):
    options: dict = {}

    def make(self, kernel, z):
        return factories.make_gp(z, kernel, (draw(M, seed=5), torch.eye(M)), jitter_val=None, **self.options)

    def loss(self):
        x, y = self.data(X, Y)
        return -tighter_gp.TighterELBO(self.likelihood, self.model, N)(self.model(x), y)

    def predict(self):
        q = self.model(*self.data(X_TEST))
        return q.mean, q.variance


class Beta(TSVGP):
    options = {"conditional": "beta"}


class SolveGP(TSVGP):
    def make(self, kernel, z):
        q, other = CholeskyVariationalDistribution(M), CholeskyVariationalDistribution(3)
        strategy = lambda model: tighter_gp.SolveGPVariationalStrategy(model, z, X[:3] + 0.05, q, other)
        model = GP(strategy, kernel)
        q.variational_mean.data.copy_(draw(M, seed=5))
        other.variational_mean.data.copy_(draw(3, seed=6))
        model.variational_strategy.variational_params_initialized.fill_(1)
        return model


class CollapsedKernel(Kind):
    def make(self, kernel, z):
        return factories.CollapsedGP(X, Y, z, kernel, self.likelihood, jitter_val=1e-6)

    def loss(self):
        x, y = self.data(X, Y)
        return -gpytorch.mlls.ExactMarginalLogLikelihood(self.likelihood, self.model)(self.model(x), y)

    def predict(self):
        q = tighter_gp.predict(self.model, *self.data(X_TEST))
        return q.mean, q.variance

    def restore_data(self):
        self.model.set_train_data(*self.data(X, Y), strict=False)


class Chunked(Kind):
    def make(self, kernel, z):
        return tighter_gp.CollapsedGP(X, Y, z, kernel, self.likelihood, chunk_size=7, jitter_val=1e-6)

    def loss(self):
        return -self.model.bound() / N

    def predict(self):
        q = self.model.predict(*self.data(X_TEST))
        return q.mean, q.variance


class GPLVM(Kind):
    def make(self, kernel, z):
        latents = VariationalLatents(draw(N, D, seed=7), stddev=0.3)
        model = BayesianGPLVM(latents, z, 3, self.likelihood, covar_module=kernel)
        model.variational_strategy._variational_distribution.variational_mean.data.copy_(draw(3, M, seed=8))
        model.variational_strategy.variational_params_initialized.fill_(1)
        return model

    def loss(self):
        x, y = self.data(draw(2, N, D, seed=9), draw(N, 3, seed=10))
        q = self.model.latents.q()
        return -LatentVariableELBO(self.likelihood, self.model, N).at(q.loc + q.scale * x, q, y).mean()

    def predict(self):
        mean, variance = self.model.reconstruct(*self.data(X_TEST))
        return mean, variance

    def restore_data(self):
        self.model.latents.prior = type(self)().model.latents.prior


KINDS = [TSVGP, Beta, SolveGP, CollapsedKernel, Chunked, GPLVM]
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)


def predicted(module: Kind):
    with torch.no_grad():
        return module.eval().predict()


def stepped(module: Kind, steps: int = 3) -> Kind:
    """After steps of plain gradient descent; nothing but the module has a state."""
    module.train()
    for _ in range(steps):
        gradients = torch.autograd.grad(module.loss(), list(module.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(module.parameters(), gradients, strict=True):
                parameter.sub_(0.02 * gradient)
    return module


def assert_equal(found, expected) -> None:
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


# ---------------------------------------------------------------------------------------------------------------------
# Copies and checkpoints
# ---------------------------------------------------------------------------------------------------------------------


def by_state_dict(module: Kind) -> Kind:
    other = type(module)(seed=1)
    other.load_state_dict(module.state_dict())
    return other.train(module.training)


def by_file(module: Kind) -> Kind:
    """torch.save, and back without executing code."""
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    other = type(module)(seed=1)
    other.load_state_dict(torch.load(file, weights_only=True))
    return other.train(module.training)


def by_pickle(module: Kind) -> Kind:
    return pickle.loads(pickle.dumps(module))


def fresh(module: Kind) -> None:
    pass


def during_training(module: Kind) -> None:
    stepped(module)
    module.loss()  # leaves whatever the first half of a step leaves


def evaluated(module: Kind) -> None:
    predicted(module)


def trained_and_evaluated(module: Kind) -> None:
    predicted(stepped(module))


def trained_after_evaluation(module: Kind) -> None:
    predicted(module)
    stepped(module)


STAGES = [fresh, during_training, evaluated, trained_and_evaluated, trained_after_evaluation]


@EVERY_KIND
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("duplicate", [by_state_dict, by_file, by_pickle, copy.deepcopy])
def test_a_copy_predicts_and_trains_as_the_original_and_lives_on_its_own(kind, stage, duplicate):
    module = kind()
    stage(module)
    training = module.training
    twin = duplicate(module)
    assert twin.training == training
    expected = predicted(module)
    assert_equal(predicted(twin), expected)
    stepped(twin)
    assert_equal(predicted(module), expected)
    assert not torch.equal(predicted(twin)[0], expected[0])
    assert_equal(predicted(stepped(module)), predicted(twin))


@EVERY_KIND
def test_a_state_dict_has_neither_data_nor_caches(kind):
    module = kind()
    names = set(module.state_dict())
    predicted(stepped(module))
    assert set(module.state_dict()) == names
    assert not any(
        value.numel() in (X.numel(), X_TEST.numel()) for n, value in module.state_dict().items() if "latents" not in n
    )


# ---------------------------------------------------------------------------------------------------------------------
# Moves
# ---------------------------------------------------------------------------------------------------------------------


@EVERY_KIND
@pytest.mark.parametrize("training", [True, False])
def test_to_float_and_back(kind, training):
    """Nothing of the other precision is left behind, in the middle of a run or after it."""
    module = kind()
    stepped(module) if training else predicted(module)
    expected = predicted(by_state_dict(module))
    module.float()
    narrow = predicted(module)
    assert all(value.dtype == torch.float32 for value in narrow)
    for value, wide in zip(narrow, expected, strict=True):
        torch.testing.assert_close(value.double(), wide, rtol=1e-2, atol=1e-2)
    stepped(module)
    assert all(parameter.dtype == torch.float32 for parameter in module.parameters())
    module.double()
    restored = by_state_dict(module)
    restored.restore_data()
    module.restore_data()
    assert_equal(predicted(module), predicted(restored))


@EVERY_KIND
@pytest.mark.parametrize("evaluated_first", [True, False])
def test_through_the_meta_device_and_back(kind, evaluated_first):
    """Parameters given up and loaded again: what was cached for the old ones must not come back."""
    module, other = kind(), stepped(kind(seed=1))
    if evaluated_first:
        predicted(module)
    module.to("meta")
    assert all(parameter.is_meta for parameter in module.parameters())
    module.to_empty(device="cpu")
    module.load_state_dict(other.state_dict())
    module.restore_data()
    assert_equal(predicted(module), predicted(other))
    assert_equal(predicted(stepped(module)), predicted(stepped(other)))


@pytest.mark.cuda
@EVERY_KIND
def test_to_an_accelerator_and_back(kind, accelerator):
    module = kind()
    expected = predicted(module)
    module.to(accelerator).cpu()
    module.restore_data()
    assert_equal(predicted(module), expected)


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints of GPyTorch
# ---------------------------------------------------------------------------------------------------------------------


def gpytorch_checkpoint():
    """What a user of SVGP has on disk, after some training."""
    torch.manual_seed(3)
    model = factories.make_gp(Z, strategy=VariationalStrategy, jitter_val=None)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    mll = gpytorch.mlls.VariationalELBO(likelihood, model, N)
    optimizer = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.05)
    for _ in range(5):
        optimizer.zero_grad()
        (-mll(model(X), Y)).backward()
        optimizer.step()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "likelihood": likelihood.state_dict()}, file)
    file.seek(0)
    with torch.no_grad():
        return file, model.eval()(X_TEST), optimizer.state_dict()


def test_a_checkpoint_of_svgp_goes_on_as_tighter_svgp():
    file, expected, optimizer_state = gpytorch_checkpoint()
    saved = torch.load(file, weights_only=True)
    model, likelihood = factories.make_gp(Z + 1, jitter_val=None), gpytorch.likelihoods.GaussianLikelihood()
    model.load_state_dict(saved["model"])
    likelihood.load_state_dict(saved["likelihood"])
    with torch.no_grad():
        q = model.eval()(X_TEST)
    torch.testing.assert_close(q.mean, expected.mean, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(q.covariance_matrix, expected.covariance_matrix, rtol=1e-9, atol=1e-9)
    mll = tighter_gp.TighterELBO(likelihood, model.train(), N)
    optimizer = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.05)
    optimizer.load_state_dict(optimizer_state)
    before = mll(model(X), Y).item()
    for _ in range(20):
        optimizer.zero_grad()
        (-mll(model(X), Y)).backward()
        optimizer.step()
    assert mll(model(X), Y).item() > before


def test_a_checkpoint_from_before_whitening_is_converted_as_gpytorch_does():
    """Very old checkpoints lack a flag; GPyTorch converts their q(u) at the first call, and says so."""
    model = factories.make_gp(
        Z, make_kernel("rbf", 1.0, torch.ones(D)), (draw(M, seed=5), torch.eye(M)), jitter_val=1e-4
    )
    old = model.state_dict()
    del old["variational_strategy.updated_strategy"]
    predictions = []
    for strategy in (tighter_gp.TighterVariationalStrategy, VariationalStrategy):
        other = factories.make_gp(Z, make_kernel("rbf", 1.0, torch.ones(D)), strategy=strategy, jitter_val=1e-4)
        with warnings.catch_warnings(record=True) as caught, torch.no_grad():
            warnings.simplefilter("always")
            other.load_state_dict(old)
            predictions.append(other.eval()(X_TEST).mean)
        assert any("updated" in str(warning.message).lower() for warning in caught)
    torch.testing.assert_close(*predictions)
    with torch.no_grad():
        assert not torch.allclose(predictions[0], model.eval()(X_TEST).mean)


# ---------------------------------------------------------------------------------------------------------------------
# Eval mode
# ---------------------------------------------------------------------------------------------------------------------


@EVERY_KIND
def test_every_parameter_changed_in_eval_mode_changes_the_prediction_at_once(kind):
    """Compared with a model that never predicted before."""
    module = kind()
    before = predicted(module)
    changed = 0
    for parameter in module.parameters():
        parameter.data.add_(0.05)  # through .data, as GPyTorch's setters do: no version counter sees it
        found = predicted(module)
        assert_equal(found, predicted(by_state_dict(module)))
        changed += not all(map(torch.equal, found, before))
        before = found
    # All but what has no part in a prediction: the conditional of a strategy, the latents and the noise of some.
    assert changed >= len(list(module.parameters())) - 2


@EVERY_KIND
def test_a_state_loaded_in_eval_mode_is_predicted_from_at_once(kind):
    module, other = kind(), stepped(kind(seed=1))
    before = predicted(module)
    module.load_state_dict(other.state_dict())
    found = predicted(module)
    assert_equal(found, predicted(other))
    assert not torch.equal(found[0], before[0])


@pytest.mark.parametrize("kind", [TSVGP, Beta, SolveGP])
def test_two_backward_passes_in_eval_mode(kind):
    module = kind().eval()
    parameters = [*module.model.covar_module.parameters(), module.model.variational_strategy.inducing_points]
    gradients = []
    for _ in range(2):
        mean, variance = module.predict()
        gradients.append(torch.autograd.grad(mean.sin().sum() + variance.log().sum(), parameters))
    assert_equal(*gradients)
    predicted(module)  # without a graph, which must not be what the next pass gets
    mean, variance = module.predict()
    assert_equal(torch.autograd.grad(mean.sin().sum() + variance.log().sum(), parameters), gradients[0])


@EVERY_KIND
def test_two_backward_passes_of_the_loss_with_a_prediction_in_between(kind):
    module = kind()
    gradients = []
    for _ in range(2):
        module.train()
        gradients.append(torch.autograd.grad(module.loss(), list(module.parameters())))
        predicted(module)
    assert_equal(*gradients)


@pytest.mark.parametrize("kind", [TSVGP, Beta, SolveGP])
def test_other_batch_shapes_in_turn_in_eval_mode(kind):
    module = kind().eval()
    for shape in ((), (3,), (2, 1), (), (2, 3), (1,)):
        x = X_TEST + 0.1 * draw(*shape, *X_TEST.shape)
        with torch.no_grad():
            found = module.model(x)
            for index in [tuple(0 for _ in shape), tuple(n - 1 for n in shape)]:
                alone = kind().eval().model(x[index])
                torch.testing.assert_close(found.mean[index], alone.mean, rtol=1e-10, atol=1e-12)
                torch.testing.assert_close(found.variance[index], alone.variance, rtol=1e-10, atol=1e-12)


class FixedNoise(CollapsedKernel):
    """With features in front of mean and kernel, and noise that is no parameter."""

    def __init__(self, seed: int = 0):
        super().__init__(seed)
        self.likelihood = self.model.likelihood = self.model.covar_module.likelihood = make_noise(torch.full((N,), 0.2))
        self.model.features = torch.nn.Linear(D, D)
        torch.nn.init.eye_(self.model.features.weight)
        forward = type(self.model).forward
        self.model.forward = lambda x: forward(self.model, self.model.features(x))


def change_lengthscale(module):
    module.model.covar_module.base_kernel.base_kernel.lengthscale = torch.tensor([0.5, 1.9])


def change_inducing_points(module):
    module.model.covar_module.inducing_points.data.add_(0.2)


def change_noise(module):
    module.likelihood.noise = torch.full((N,), 0.7)


def change_jitter(module):
    module.model.covar_module.jitter_val = 0.3


def change_mean(module):
    module.model.mean_module.initialize(constant=3.0)


def change_features(module):
    module.model.features.weight.data.mul_(1.3)


def change_targets(module):
    module.model.train_targets.data.mul_(2.0)


CHANGES = [
    change_lengthscale,
    change_inducing_points,
    change_noise,
    change_jitter,
    change_mean,
    change_features,
    change_targets,
]


def exact_predictions(module):
    """GPyTorch's own and this package's, without a graph and with one."""
    found = []
    for graph in (False, True):
        with torch.set_grad_enabled(graph):
            for q in (module.model(X_TEST), tighter_gp.predict(module.model, X_TEST)):
                found += [q.mean.detach(), q.variance.detach()]
    return found


@pytest.mark.parametrize("change", CHANGES)
def test_predictions_of_a_collapsed_model_follow_every_change_at_once(change):
    """Also GPyTorch's own, whose ExactGP keeps the posterior of the first call until the mode changes."""
    module = FixedNoise().eval()
    before = exact_predictions(module)
    assert_equal(exact_predictions(module), before)
    change(module)
    found = exact_predictions(module)
    assert_equal(exact_predictions(module), found)
    means = slice(0, None, 2)
    assert not any(map(torch.equal, found[means], before[means]))
    module.train().eval()
    assert_equal(found, exact_predictions(module))
