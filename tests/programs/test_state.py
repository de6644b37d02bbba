"""State of every kind of model: copies, checkpoints, moves, and caches that never go stale.

What is special to one class is tested beside it; here is what all of them promise.
"""

from __future__ import annotations

import copy
import io
import pickle

import gpytorch
import pytest
import torch
from gpytorch.variational import VariationalStrategy

import tighter_gp
from tests.tools import factories
from tests.tools.factories import make_kernel, make_noise
from tests.tools.solve_gp import make_solve_gp
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
        q_u, q_v = (draw(M, seed=5), torch.eye(M)), (draw(3, seed=6), torch.eye(3))
        return make_solve_gp(z, X[:3] + 0.05, kernel, q_u, q_v, jitter_val=None)


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
        return -LatentVariableELBO(self.likelihood, self.model, N).at(q.loc + q.scale * x, q, y).bound.mean()

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


# ---- Copies and checkpoints -------------------------------------------------------------------------------------------


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


def trained_and_evaluated(module: Kind) -> None:
    predicted(stepped(module))


STAGES = [fresh, during_training, trained_and_evaluated]


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


# ---- Moves ------------------------------------------------------------------------------------------------------------


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


@pytest.mark.cuda
@EVERY_KIND
def test_to_an_accelerator_and_back(kind, accelerator):
    module = kind()
    expected = predicted(module)
    module.to(accelerator).cpu()
    module.restore_data()
    assert_equal(predicted(module), expected)


# ---- Checkpoints of GPyTorch ------------------------------------------------------------------------------------------


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


# ---- Eval mode --------------------------------------------------------------------------------------------------------


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
