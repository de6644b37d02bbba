"""What users do beside the documented ways, and what fit makes of it."""

from __future__ import annotations

import gpytorch
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import tighter_gp
from tests.tools.factories import make_gp, make_kernel, make_noise
from tests.tools.solve_gp import Joint, make_solve_gp
from tests.training.problems import M, N, collapsed, data, gplvm, parameters, problem
from tighter_gp.training import distributed, fit, mean_nlpd
from tighter_gp.training.loaders import LoaderBatches
from tighter_gp.training.natural import NaturalGradients
from tighter_gp.training.natural_steps import _kinds
from tighter_gp.training.problem import Problem


@pytest.mark.parametrize("make", [problem, collapsed])
def test_a_callback_may_leave_the_model_in_eval_mode(make):
    x, y = data()

    def predict(step):
        for module in (step.model, step.likelihood):
            module.eval()
        step.model(x[:5])

    found = []
    for callbacks in ([], [predict]):
        model, likelihood = make()
        arguments = (x, y) if make is problem else ()
        fit(model, likelihood, *arguments, steps=8, callbacks=callbacks, **({"batch_size": 16} if arguments else {}))
        found.append(parameters(model, likelihood))
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("before", [True, False])
def test_a_callback_that_freezes_or_unfreezes_is_told(before):
    model, likelihood = problem()
    likelihood.raw_noise.requires_grad_(before)
    change = lambda step: likelihood.raw_noise.requires_grad_(not before) and None
    with pytest.raises(RuntimeError, match=r"froze, unfroze or replaced likelihood\.noise_covar\.raw_noise"):
        fit(model, likelihood, *data(), steps=3, callbacks=[change])


def test_lbfgs_on_an_objective_that_draws_is_refused():
    *arguments, options = gplvm()
    with pytest.raises(ValueError, match="draws x: use Adam, or train a CollapsedBayesianGPLVM"):
        fit(*arguments, **options, steps=2, optimizer="lbfgs")


def test_natural_gradients_follow_the_objectives_number_of_data():
    x, y = data()
    objective = lambda likelihood, model, num_data: tighter_gp.TighterELBO(likelihood, model, 10 * num_data)
    losses = []
    for options in ({"batch_size": None, "steps": 40}, {"optimizer": "lbfgs", "steps": 400}):
        model, likelihood = problem()
        for parameter in [*model.hyperparameters(), *likelihood.parameters()]:
            parameter.requires_grad_(False)
        model.variational_strategy.inducing_points.requires_grad_(False)
        fit(model, likelihood, x, y, objective=objective, **options)
        losses.append(-objective(likelihood, model, N)(model(x), y))
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-6)


def test_a_size_of_natural_steps_is_one():
    found = []
    for size in (1.0, 0.999999999, None):
        model, likelihood = problem()
        fit(model, likelihood, *data(), steps=6, batch_size=16, natural_gradients=size)
        found.append(parameters(model))
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)
    assert (found[0] - found[2]).abs().max() > 1e-3
    for size in (0.0, -0.5, 1.5, float("nan")):
        with pytest.raises(ValueError, match="size of a step, above 0 and at most 1"):
            fit(*problem(), *data(), steps=1, natural_gradients=size)


def test_a_learning_rate_reaches_the_inducing_points():
    model, likelihood = problem()
    before = model.variational_strategy.inducing_points.clone()
    fit(model, likelihood, *data(), steps=5, batch_size=16, lr=1e-9)
    torch.testing.assert_close(model.variational_strategy.inducing_points, before, rtol=0, atol=1e-7)


def test_kinds_of_parameters():
    class Warped(gpytorch.kernels.RBFKernel):
        def __init__(self):
            super().__init__()
            self.network = torch.nn.Linear(2, 2)

        def forward(self, x1, x2, **kwargs):
            return super().forward(self.network(x1), self.network(x2), **kwargs)

    kernel = gpytorch.kernels.ScaleKernel(Warped()) + gpytorch.kernels.LinearKernel()
    model, likelihood = make_gp(data()[0][:M].clone(), kernel), make_noise(0.2)
    kinds = _kinds(Problem(model, likelihood, tighter_gp.TighterELBO(likelihood, model, N), N, 0))
    others = {name.rpartition(".")[2]: kind for name, kind in kinds.items() if ".network." in name}
    assert others == {"weight": "other", "bias": "other"}
    assert sorted(name.rpartition("raw_")[2] for name, kind in kinds.items() if kind == "hyper") == [
        "constant",
        "lengthscale",
        "noise",
        "outputscale",
        "variance",
    ]

    class Mixed(gpytorch.models.ApproximateGP):
        def __init__(self):
            q = gpytorch.variational.CholeskyVariationalDistribution(M, batch_shape=torch.Size([2]))
            base = tighter_gp.TighterVariationalStrategy(self, data()[0][:M].expand(2, M, 2).clone(), q)
            super().__init__(gpytorch.variational.LMCVariationalStrategy(base, num_tasks=3, num_latents=2))

    mixed = Mixed()
    likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(3)
    kinds = _kinds(Problem(mixed, likelihood, None, N, 0))
    assert kinds["model.variational_strategy.lmc_coefficients"] == "hyper"


class Classes(gpytorch.models.ApproximateGP):
    def __init__(self, points, shape):
        q = gpytorch.variational.CholeskyVariationalDistribution(len(points), batch_shape=shape)
        super().__init__(tighter_gp.TighterVariationalStrategy(self, points.expand(*shape, *points.shape).clone(), q))
        self.mean_module = gpytorch.means.ConstantMean(batch_shape=shape)
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(), batch_shape=shape)

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def test_dirichlet_classification_takes_its_own_targets_and_is_validated_on_labels():
    x, y = data()
    labels = (y > 0).long() + (y > 0.8).long()
    likelihood = gpytorch.likelihoods.DirichletClassificationLikelihood(labels, dtype=x.dtype)
    model = Classes(x[:M], torch.Size([3]))
    with pytest.raises(ValueError, match=r"pass y=likelihood\.transformed_targets"):
        fit(model, likelihood, x, labels, steps=1)
    targets = likelihood.transformed_targets
    history = fit(model, likelihood, x, targets, steps=20, batch_size=16, validation=(x[:9], labels[:9]))
    score = -tighter_gp.predict_y(model, likelihood, x[:9]).log_prob(labels[:9]).mean()
    assert history.validation[-1][1] == pytest.approx(score.item(), rel=1e-6)


def test_a_frozen_q_that_was_set_by_hand_stays():
    model, likelihood = problem()
    q = model.variational_strategy._variational_distribution
    model.variational_strategy.variational_params_initialized.fill_(0)
    with torch.no_grad():
        q.variational_mean.fill_(3.0)
    q.requires_grad_(False)
    fit(model, likelihood, *data(), steps=3, batch_size=16)
    assert (q.variational_mean == 3).all()


def test_initialize_leaves_frozen_orthogonal_points():
    j = Joint(5)
    model = make_solve_gp(j.z, j.o, j.kernel, jitter_val=1e-6)
    points = model.variational_strategy.orthogonal_points.requires_grad_(False)
    before, inducing = points.clone(), model.variational_strategy.inducing_points.clone()
    tighter_gp.initialize(model, make_noise(0.1), j.p.x, j.p.y)
    assert torch.equal(points, before)
    assert not torch.equal(model.variational_strategy.inducing_points, inducing)


def test_initialize_with_repeated_rows_inputs_that_want_gradients_and_the_random_state():
    x, y = data()
    x = x[torch.arange(N) % 9].requires_grad_()
    model = make_gp(x[:M].detach().clone(), make_kernel("rbf", 1.0, torch.ones(2)))
    model.variational_strategy.inducing_points.requires_grad_(False)
    state = torch.get_rng_state()
    tighter_gp.initialize(model, make_noise(0.2), x, y, num_rows_used=8)
    fit(model, make_noise(0.2), x, y, steps=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert x.grad is None


def test_a_mixture_of_the_nodes_of_a_dspp_is_scored_with_its_weights():
    from gpytorch.models.deep_gps.dspp import DSPP, DSPPLayer

    class Layer(DSPPLayer):
        def __init__(self, inputs, outputs):
            shape = torch.Size([]) if outputs is None else torch.Size([outputs])
            q = gpytorch.variational.MeanFieldVariationalDistribution(M, batch_shape=shape)
            points = torch.randn(*shape, M, inputs)
            super().__init__(tighter_gp.TighterVariationalStrategy(self, points, q), inputs, outputs, num_quad_sites=3)
            self.mean_module = gpytorch.means.ConstantMean(batch_shape=shape)
            self.covar_module = gpytorch.kernels.RBFKernel(batch_shape=shape)

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    class Model(DSPP):
        def __init__(self):
            super().__init__(num_quad_sites=3)
            self.hidden, self.last = Layer(2, 1), Layer(1, None)

        def forward(self, x):
            return self.last(self.hidden(x))

    x, y = data()
    model, likelihood = Model(), make_noise(0.2)
    model.raw_quad_weights.data.copy_(torch.tensor([3.0, 0.0, -3.0]))
    model(x)
    expected = -tighter_gp.predict_y(model.eval(), likelihood, x).log_prob(y).mean()
    assert mean_nlpd(model, likelihood, x, y) == pytest.approx(expected.item(), rel=1e-6)


def test_parts_of_a_sum_of_gps_share_a_natural_step():
    class Part(gpytorch.models.ApproximateGP):
        def __init__(self, dim):
            q = gpytorch.variational.CholeskyVariationalDistribution(M)
            super().__init__(tighter_gp.TighterVariationalStrategy(self, data()[0][:M, dim : dim + 1].clone(), q))
            self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), gpytorch.kernels.RBFKernel()

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    parts = torch.nn.ModuleList([Part(0), Part(1)])
    assert NaturalGradients(parts, N)._coupled == 2
    assert NaturalGradients(parts[0], N)._coupled == 1


def test_batches_of_a_loader_are_counted_over_processes(monkeypatch):
    x, y = data()
    loader = DataLoader(TensorDataset(x, y), batch_size=5)
    assert LoaderBatches(loader, 0, x, num_data=N).batch_size == 5
    monkeypatch.setattr(distributed, "total", lambda value, device: 2 * value)
    assert LoaderBatches(loader, 0, x, num_data=N).batch_size == 10
