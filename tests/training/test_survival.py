"""Training that survives: 64 badly conditioned float32 problems, and faults put into chosen steps.

``TIGHTER_GP_SOAK=1`` makes every run many times as long and adds the other strategies and conditionals to all of them.
"""

from __future__ import annotations

import copy
import math
import os

import gpytorch
import pytest
import torch
from gpytorch.mlls import VariationalELBO
from gpytorch.variational import NaturalVariationalDistribution, VariationalStrategy
from linear_operator.utils.errors import NotPSDError
from tighter_gp.moments import Whitened

import tighter_gp
from tests.tools import adversarial, dense
from tests.tools.adversarial import SETTINGS
from tests.tools.factories import GP, CollapsedGP, make_gp, make_kernel, make_noise
from tighter_gp import bounds
from tighter_gp.prior.kernels import lower
from tighter_gp.training import checkpoint as checkpoints
from tighter_gp.training import fit

SOAK = bool(os.environ.get("TIGHTER_GP_SOAK"))
STEPS = 200 if SOAK else 12

pytestmark = [
    # Said when a jitter had to be added: these problems are made for it.
    pytest.mark.filterwarnings("ignore:.*was not positive definite"),
    pytest.mark.filterwarnings("ignore::linear_operator.utils.warnings.NumericalWarning"),
]


def parameters(*modules) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for module in modules for p in module.parameters()])


# ---------------------------------------------------------------------------------------------------------------------
# Sixty-four settings
# ---------------------------------------------------------------------------------------------------------------------


def test_there_are_sixty_four_different_settings():
    assert len(set(map(str, SETTINGS))) == 64


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("batch_size", [None, 20], ids=["all", "batches"])
def test_fit_ends_with_finite_parameters(setting, batch_size):
    problem = adversarial.build(setting)
    before = parameters(problem.model, problem.likelihood)
    history = fit(*problem, steps=STEPS, batch_size=batch_size, lr=setting.lr, schedule="constant", progress=False)
    assert history.steps == STEPS
    assert adversarial.all_finite(problem)
    assert sum(map(math.isfinite, history.loss)) > 0.8 * STEPS
    assert not torch.equal(parameters(problem.model, problem.likelihood), before)


def is_refused_by_gpytorch(setting) -> bool:
    """Whether SVGP ends in NotPSDError: its jitter is absolute, so a large outputscale drowns it."""
    try:
        adversarial.hand_written_loop(
            adversarial.build(setting, VariationalStrategy), setting, STEPS if SOAK else 3, VariationalELBO
        )
    except NotPSDError:
        return True
    except Exception:  # NanError and what comes of NaN: a step too long, no matter of the factorisation
        return False
    return False


def test_a_hand_written_loop_survives_wherever_gpytorch_cannot_factorise():
    refused = [setting for setting in SETTINGS if is_refused_by_gpytorch(setting)]
    assert len(refused) > 16
    for setting in refused:
        ours = adversarial.build(setting)
        losses = adversarial.hand_written_loop(ours, setting, STEPS, tighter_gp.TighterELBO)
        assert adversarial.is_sound(losses, ours), setting


def solve_gp(model, z, q, **kwargs):
    """Half of the points orthogonal: coinciding ones are then in both sets."""
    size = z.size(0) // 2
    first, second = (gpytorch.variational.CholeskyVariationalDistribution(n) for n in (size, z.size(0) - size))
    return tighter_gp.SolveGPVariationalStrategy(model, z[:size], z[size:], first, second, **kwargs)


def with_conditional(conditional):
    def strategy(*args, **kwargs):
        return tighter_gp.TighterVariationalStrategy(*args, conditional=conditional, **kwargs)

    return strategy


OTHERS = {
    "solve-gp": (solve_gp, tighter_gp.TighterELBO),
    "standard bound": (tighter_gp.TighterVariationalStrategy, VariationalELBO),
    **{name: (with_conditional(name), tighter_gp.TighterELBO) for name in ("beta", "scalar")},
}


@pytest.mark.parametrize("setting", SETTINGS if SOAK else SETTINGS[-1::-9], ids=str)
@pytest.mark.parametrize("name", OTHERS)
def test_other_strategies_conditionals_and_objectives_survive_too(name, setting):
    strategy, objective = OTHERS[name]
    problem = adversarial.build(setting, strategy)
    fit(*problem, objective=objective, steps=STEPS, batch_size=20, lr=setting.lr, schedule="constant", progress=False)
    assert adversarial.all_finite(problem)


@pytest.mark.parametrize("setting", SETTINGS if SOAK else SETTINGS[::5], ids=str)
@pytest.mark.parametrize("num_blocks", [20, 6])
def test_blocks_survive_too(num_blocks, setting):
    labels = tighter_gp.blocks.partition(adversarial.build(setting).x, num_blocks)
    problem = adversarial.build(setting, with_conditional(tighter_gp.Blocks(labels)))
    history = fit(*problem, steps=STEPS, batch_size=None, lr=setting.lr, schedule="constant", progress=False)
    assert adversarial.all_finite(problem)
    assert sum(map(math.isfinite, history.loss)) > 0.8 * STEPS


def collapsed_settings():
    """L-BFGS has no learning rate."""
    settings = [setting for setting in SETTINGS if setting.lr == 1.0]
    return settings if SOAK else settings[-1::-5]


@pytest.mark.parametrize("setting", collapsed_settings(), ids=str)
def test_a_collapsed_model_survives_too(setting):
    model, likelihood, x, y = adversarial.build(setting)
    z = model.variational_strategy.inducing_points.detach()
    gp = CollapsedGP(x, y, z, model.covar_module, likelihood).float()
    # BoTorch, where it was imported, turns these off, and GPyTorch then factorises the covariance of all points.
    with gpytorch.settings.fast_computations():
        history = fit(gp, likelihood, x, y, steps=STEPS // 2, progress=False)
    assert all(bool(torch.isfinite(p).all()) for p in gp.parameters())
    assert sum(map(math.isfinite, history.loss)) > 0
    prediction = tighter_gp.predict(gp, x)
    assert bool(torch.isfinite(prediction.mean).all())
    assert bool((prediction.variance >= 0).all())


@pytest.mark.parametrize("setting", SETTINGS if SOAK else SETTINGS[::9], ids=str)
def test_a_trained_model_predicts_finite_means_and_variances(setting):
    problem = adversarial.build(setting)
    fit(*problem, steps=STEPS, batch_size=None, lr=setting.lr, schedule="constant", progress=False)
    with torch.no_grad():
        q = problem.model.eval()(problem.x)
    assert bool(torch.isfinite(q.mean).all())
    assert bool((q.variance >= 0).all())


# ---------------------------------------------------------------------------------------------------------------------
# What makes it survive
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("error:.*was not positive definite")
def test_what_float32_cannot_factorise_is_evaluated_again_in_double():
    """At short lengthscales rounding in the distances makes points that almost coincide disagree."""
    generator = torch.Generator().manual_seed(0)
    x, shift = (torch.rand(n, 2, generator=generator, dtype=torch.float32) for n in (N, 30))
    z, lengthscale = x[torch.arange(30) % 3] + 2e-4 * shift, 5e-4
    values, bounds_found = [], []
    for dtype in (torch.float32, torch.float64):
        kernel = make_kernel("rbf", 1.0, torch.full((2,), lengthscale)).to(dtype)
        model, likelihood = make_gp(z.to(dtype), kernel, jitter_val=1e-4).to(dtype), make_noise(0.01).to(dtype)
        model.variational_strategy.variational_params_initialized.fill_(1)  # with no random start
        model.variational_strategy._variational_distribution.variational_mean.data.copy_(torch.linspace(-2, 2, 30))
        bound = tighter_gp.evaluate_bound(model, likelihood, x.to(dtype), x[:, 0].to(dtype)).double()
        with torch.no_grad():
            q, chunked = model.eval()(x.to(dtype)), tighter_gp.predict(model, x.to(dtype))
        values.append(torch.stack([q.mean, q.variance, chunked.mean, chunked.variance]).double())
        bounds_found.append(bound)
    torch.testing.assert_close(*bounds_found, rtol=1e-5, atol=0)
    torch.testing.assert_close(*values, rtol=1e-5, atol=1e-5)
    rough = lower(make_kernel("rbf", 1.0, torch.full((2,), lengthscale)).float())
    matrix = rough.covariance(rough.values, z, z).detach().double() + 1e-4 * torch.eye(len(z))
    assert torch.linalg.eigvalsh(matrix).min() < 0, "float32 would do: the test tests nothing"


def smooth_kernel(kind: str, variance: float) -> gpytorch.kernels.Kernel:
    """Nearly constant; the periodic one is evaluated by GPyTorch itself."""
    if kind == "matern":
        return make_kernel("matern", variance, torch.full((2,), 100.0))
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.PeriodicKernel())
    kernel.outputscale, kernel.base_kernel.lengthscale, kernel.base_kernel.period_length = variance, 1e4, 3.0
    return kernel


@pytest.mark.parametrize("kind", ["matern", "periodic"])
@pytest.mark.parametrize("solve_gp", [False, True], ids=["T-SVGP", "T-SOLVE-GP"])
@pytest.mark.parametrize(("variance", "jitter_val"), [(1e6, 1e-4), (1.0, 1e-7)])
def test_float32_has_the_numbers_of_double_where_its_rounding_exceeds_the_jitter(variance, jitter_val, solve_gp, kind):
    """In the bound, in eval mode and in predict; rounding the kernel alone would cost a per cent and more."""
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(40, 2, generator=generator)
    y = math.sqrt(variance) * (torch.sin(6 * x[:, 0]) + 0.1 * torch.randn(40, generator=generator))
    mean, root = torch.randn(12, generator=generator), torch.eye(12) + 0.1 * torch.rand(12, 12, generator=generator)
    found = []
    for dtype in (torch.float32, torch.float64):
        kernel = smooth_kernel(kind, variance)

        def strategy(model):
            sizes = (6, 6) if solve_gp else (12,)
            q = [gpytorch.variational.CholeskyVariationalDistribution(size) for size in sizes]
            kind = tighter_gp.SolveGPVariationalStrategy if solve_gp else tighter_gp.TighterVariationalStrategy
            return kind(model, *x[:12].split(sizes), *q, jitter_val=jitter_val)

        model, likelihood = GP(strategy, kernel).to(dtype), make_noise(1e-2 * variance).to(dtype)
        distributions = [m for m in model.modules() if hasattr(m, "chol_variational_covar")]
        for distribution, rows in zip(
            distributions, (slice(0, 6), slice(6, 12)) if solve_gp else (slice(12),), strict=True
        ):
            distribution.variational_mean.data.copy_(mean[rows])
            distribution.chol_variational_covar.data.copy_(root[rows, rows].tril())
        model.variational_strategy.mark_initialized()
        bound = tighter_gp.evaluate_bound(model, likelihood, x.to(dtype), y.to(dtype)).reshape(1)
        with torch.no_grad():
            q = model.eval()(x.to(dtype))
        chunked = tighter_gp.predict(model, x.to(dtype))
        found.append([bound, q.mean, q.variance, q.covariance_matrix, chunked.mean, chunked.variance])
    for narrow, wide in zip(*found, strict=True):
        assert narrow.dtype == torch.float32
        torch.testing.assert_close(narrow.double(), wide, rtol=1e-5, atol=2e-6 * float(wide.detach().abs().max()))


@pytest.mark.parametrize("variance", [1e6, 1.0])
def test_rounding_above_the_jitter_is_noticed_where_nothing_fails(variance):
    """Two points a thousandth of a lengthscale apart: float32 has one digit of what they differ in, and a factor."""
    x, found = torch.linspace(-1, 1, 7).unsqueeze(-1).float(), []
    jitter_val = 1e-10 * variance
    for dtype in (torch.float32, torch.float64):
        kernel = make_kernel("rbf", variance, torch.ones(1))
        q = torch.tensor([1.0, 2.0]), torch.eye(2)
        model = make_gp(torch.tensor([[0.0], [1e-3]]), kernel, q, jitter_val=jitter_val).to(dtype).eval()
        q, chunked = model(x.to(dtype)), tighter_gp.predict(model, x.to(dtype))
        bound = tighter_gp.evaluate_bound(model, make_noise(variance).to(dtype), x.to(dtype), x[:, 0].to(dtype))
        model.train()(x.to(dtype))
        found.append([q.mean, q.variance, chunked.mean, chunked.variance, bound, model(x.to(dtype)).mean])
    for narrow, wide in zip(*found, strict=True):
        torch.testing.assert_close(narrow.double(), wide, rtol=1e-5, atol=2e-6 * wide.abs().max().item())
    rough = make_kernel("rbf", 1.0, torch.ones(1)).float()(torch.tensor([[0.0], [1e-3]]).float()).to_dense()
    assert 1 - rough[0, 1].item() != pytest.approx(5e-7, rel=0.02), "float32 would do: the test tests nothing"


def test_blocks_in_float32_have_the_bound_of_double():
    """Whose gain over single points is a difference of covariances, here a millionth of them."""
    setting = next(s for s in SETTINGS if str(s) == "unscaled-short-spread-noise0.01-lr0.1-rbf")
    bounds_found = []
    for dtype in (torch.float32, torch.float64):
        labels = tighter_gp.blocks.partition(adversarial.build(setting).x, 6)
        strategy = with_conditional(tighter_gp.Blocks(labels))
        problem = adversarial.build(setting, strategy, dtype=dtype, jitter_val=1e-4)
        tighter_gp.set_optimal_q(*problem)
        mll = tighter_gp.TighterELBO(problem.likelihood, problem.model, len(problem.y), combine_terms=False)
        bounds_found.append(mll(problem.model.train()(problem.x), problem.y).conditional.double())
    torch.testing.assert_close(*bounds_found, rtol=1e-4, atol=0)


@pytest.mark.parametrize("variance", [1.0, 1e12])
def test_orthogonal_points_that_add_nothing_get_a_jitter_of_the_prior_they_came_from(variance):
    """A linear kernel in one dimension has rank one: nothing is left of the second set but rounding, or exactly zero."""
    x = torch.linspace(1.0, 2.0, N).unsqueeze(-1).float()
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.LinearKernel())
    kernel.outputscale = variance
    model, likelihood = GP(lambda model: solve_gp(model, x[:2], None), kernel).float(), make_noise(1e-6).float()
    history = fit(model, likelihood, x, math.sqrt(variance) * x[:, 0], steps=5, lr=0.1, progress=False)
    assert not history.skipped
    assert bool(torch.isfinite(parameters(model, likelihood)).all())


@pytest.mark.parametrize("error", [torch.linalg.LinAlgError, NotPSDError])
def test_a_prediction_goes_on_where_gpytorch_cannot_decompose_what_nobody_asked_for(monkeypatch, error):
    model = make_gp(torch.rand(5, 2), jitter_val=1e-6, mean=0.3)
    x = torch.rand(7, 2)
    with torch.no_grad():
        model(x)
        expected = model.eval()(x)
        expected = expected.mean, expected.variance

        def fail(*args, **kwargs):
            raise error("eigh did not converge")

        monkeypatch.setattr(VariationalStrategy, "forward", fail)
        found = model(x)
    torch.testing.assert_close((found.mean, found.variance), expected)


@pytest.mark.parametrize("form", ["root", "stddev"])
def test_a_standard_deviation_of_zero_costs_what_a_tiny_one_does(form):
    """Adam with a rate of 1 lands there from its start at 1."""
    mean, tiny = torch.zeros(3, dtype=torch.float32), torch.finfo(torch.float32).tiny
    divergence = []
    for last in (0.0, tiny):
        spread = torch.tensor([1.0, 0.5, last], dtype=torch.float32, requires_grad=True)
        q = Whitened(mean, root=torch.diag(spread)) if form == "root" else Whitened(mean, stddev=spread)
        divergence.append(bounds.whitened_kl(q))
        (gradient,) = torch.autograd.grad(divergence[-1], spread)
        torch.testing.assert_close(gradient[:2], torch.tensor([0.0, -1.5], dtype=torch.float32))
        if last == 0:
            assert gradient[2] == 0
    assert divergence[0] == divergence[1]
    assert bool(torch.isfinite(divergence[0]))


@pytest.mark.filterwarnings("error::linear_operator.utils.warnings.NumericalWarning")
def test_the_best_mean_field_q_keeps_variances_that_gpytorch_rounds_up():
    x, y = data()
    model = make_gp(
        x[:3].clone(),
        make_kernel("rbf", 1.0, torch.ones(2)),
        distribution=gpytorch.variational.MeanFieldVariationalDistribution,
    )
    tighter_gp.set_optimal_q(model, make_noise(1e-14), x, y)
    stddev = model.variational_strategy._variational_distribution._variational_stddev
    projection = torch.linalg.solve_triangular(
        torch.linalg.cholesky(dense.rbf(x[:3], x[:3], 1.0, torch.ones(2))),
        dense.rbf(x[:3], x, 1.0, torch.ones(2)),
        upper=False,
    )
    torch.testing.assert_close(stddev.detach(), (1 + projection.square().sum(-1) / 1e-14).rsqrt(), rtol=1e-6, atol=0)


# ---------------------------------------------------------------------------------------------------------------------
# Faults in chosen steps
# ---------------------------------------------------------------------------------------------------------------------

N, M = 53, 6


def data():
    generator = torch.Generator().manual_seed(3)
    x = 3 * torch.rand(N, 2, generator=generator)
    return x, torch.sin(2 * x[:, 0]) + 0.2 * torch.randn(N, generator=generator)


def problem(**kwargs):
    x, _ = data()
    return make_gp(x[:M].clone(), make_kernel("rbf", 1.0, torch.tensor([0.9, 1.3])), **kwargs), make_noise(0.2)


class Faults:
    """Makes every Cholesky factorisation fail in the steps it is given."""

    def __init__(self, monkeypatch, steps):
        self.steps, self.step, original = set(steps), 0, torch.linalg.cholesky_ex

        def cholesky_ex(matrix, **kwargs):
            factor, info = original(matrix, **kwargs)
            return factor, torch.ones_like(info) if self.step in self.steps else info

        monkeypatch.setattr(torch.linalg, "cholesky_ex", cholesky_ex)

    def __call__(self, state):
        """As a callback of fit."""
        self.step = state.step


@pytest.fixture
def states(monkeypatch):
    """What a checkpoint of every step holds."""
    found = []
    monkeypatch.setattr(checkpoints, "save", lambda path, state: found.append(copy.deepcopy(state)))
    return found


def train(callbacks, *, natural=False, steps=8, **kwargs):
    model, likelihood = problem(**({"distribution": NaturalVariationalDistribution} if natural else {}))
    options = {"batch_size": 16, "lr": 0.05, "checkpoint": "run.pt", "checkpoint_every": 1, "progress": False}
    history = fit(
        model, likelihood, *data(), steps=steps, callbacks=callbacks, natural_gradients=natural, **{**options, **kwargs}
    )
    return model, likelihood, history


def same(a, b) -> bool:
    """Equality of nested states, bit for bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


STATE = ("model", "likelihood", "optimizer")


@pytest.mark.parametrize("natural", [False, True], ids=["adam", "natural"])
def test_a_failed_factorisation_leaves_parameters_and_optimizer_untouched(monkeypatch, states, caplog, natural):
    _, _, history = train([Faults(monkeypatch, {4})], natural=natural)
    for part in STATE:
        assert same(states[4][part], states[3][part]), part
        assert not same(states[5][part], states[4][part]) or part == "likelihood"
    ((step, reason),) = history.skipped
    assert step == 4
    assert "K_ZZ (6x6, float64) is not positive definite" in reason
    assert f"step 4 was skipped: {reason}" in caplog.text
    assert [math.isnan(loss) for loss in history.loss] == [i == 4 for i in range(8)]


@pytest.mark.parametrize("natural", [False, True], ids=["adam", "natural"])
def test_a_second_failure_in_a_row_undoes_the_last_update(monkeypatch, states, caplog, natural):
    _, _, history = train([Faults(monkeypatch, {4, 5})], natural=natural)
    for part in ("model", "likelihood"):
        assert same(states[5][part], states[2][part]), part
        assert not same(states[4][part], states[2][part]), part
        assert not same(states[6][part], states[5][part]), part
    assert [step for step, _ in history.skipped] == [4, 5]
    assert "undone" not in history.skipped[0][1]
    assert history.skipped[1][1].endswith("The last update was undone.")
    assert "The last update was undone." in caplog.text
    assert states[5]["optimizer"]["damping"] == 0.25
    assert states[7]["optimizer"]["damping"] == pytest.approx(0.25 * 1.1**2)


@pytest.mark.parametrize("natural", [False, True], ids=["adam", "natural"])
def test_a_last_update_after_which_nothing_can_be_computed_is_undone(monkeypatch, states, caplog, natural):
    _, _, history = train([Faults(monkeypatch, {8})], natural=natural)
    ((step, reason),) = history.skipped
    assert step == 7
    assert "K_ZZ (6x6, float64) is not positive definite" in reason
    assert reason.endswith("The last update was undone.")
    assert f"after the last step: {reason}" in caplog.text
    for part in ("model", "likelihood"):
        assert same(states[-1][part], states[6][part]), part
    assert all(map(math.isfinite, history.loss))


def test_after_an_undone_update_the_step_is_a_quarter(monkeypatch, states):
    """The first step of Adam has the length of its rate."""
    train([Faults(monkeypatch, {1, 2})], steps=5, schedule="constant")
    mean = lambda i: states[i]["model"]["mean_module.raw_constant"]
    start = mean(2)  # step 0 is undone
    assert abs(float(mean(0) - start)) == pytest.approx(0.05, rel=1e-4)
    assert abs(float(mean(3) - start)) == pytest.approx(0.05 / 4, rel=1e-4)


def test_a_run_interrupted_between_two_failures_resumes_to_the_same_numbers(monkeypatch, tmp_path):
    class Interrupted(Exception):
        pass

    def interrupt(state):
        if state.step == 6:
            raise Interrupted

    results = []
    for callbacks in ([], [interrupt]):
        with monkeypatch.context() as patch:
            faults, path = Faults(patch, {4, 5}), tmp_path / f"{len(callbacks)}.pt"
            try:
                model, likelihood, history = train([faults, *callbacks], checkpoint=path, steps=12)
            except Interrupted:
                faults.step = 5
                assert torch.load(path, weights_only=True)["history"]["skipped"][0][0] == 4
                model, likelihood, history = train([faults], checkpoint=path, steps=12, resume=True)
            results.append((parameters(model, likelihood), history))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1].skipped == results[1][1].skipped


class Indefinite(gpytorch.kernels.RBFKernel):
    """No covariance function: points are the less alike the nearer they are."""

    def forward(self, x1, x2, diag=False, **params):
        return 1 - 0.5 * super().forward(x1, x2, diag=diag, **params)


def test_the_error_after_failures_in_a_row_says_all_that_is_known():
    x, y = data()
    q = gpytorch.variational.CholeskyVariationalDistribution(M)
    strategy = lambda model: tighter_gp.TighterVariationalStrategy(model, x[:M].clone(), q, jitter_val=1e-5)
    model = GP(strategy, gpytorch.kernels.ScaleKernel(Indefinite()))
    model.covar_module.outputscale, model.covar_module.base_kernel.lengthscale = 2.5, 0.7
    likelihood = make_noise(0.375)
    before = parameters(model.covar_module, model.mean_module, likelihood)
    with pytest.raises(RuntimeError, match="3 steps in a row failed, the last, step 2") as caught:
        fit(model, likelihood, x, y, max_failures=3, progress=False)
    message = str(caught.value)
    for part in (
        r"K_ZZ (6x6, float64) is not positive definite",
        "its smallest eigenvalue is -",
        "jitter_val was 1e-05",
        "adding up to 1.3e-02 did not help",
        "base_kernel.lengthscale=0.7",
        "covar_module.outputscale=2.5",
        "noise=0.375",
        "Try a larger jitter_val, inputs and targets scaled",
        "A smaller lr, scaled data or float64 may help.",
    ):
        assert part in message, part
    assert isinstance(caught.value.__cause__, NotPSDError)
    assert torch.equal(parameters(model.covar_module, model.mean_module, likelihood), before)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("natural", [False, True], ids=["adam", "natural"])
def test_a_loss_that_is_not_finite_never_reaches_the_parameters(bad, natural, monkeypatch):
    forward, calls, seen = tighter_gp.TighterELBO.forward, [], []

    def sometimes(self, *args, **kwargs):
        calls.append(0)
        value = forward(self, *args, **kwargs)
        return value * bad if len(calls) % 3 == 0 else value

    monkeypatch.setattr(tighter_gp.TighterELBO, "forward", sometimes)
    record = lambda state: seen.append(bool(torch.isfinite(parameters(state.model, state.likelihood)).all()))
    _, _, history = train([record], natural=natural, checkpoint=None, steps=30)
    assert all(seen)
    assert [step for step, _ in history.skipped] == list(range(1, 30, 3))
    assert all("the loss is" in reason for _, reason in history.skipped)


def test_a_step_that_raises_in_a_hand_written_loop_leaves_nothing_behind(monkeypatch):
    """The loop continues to the numbers of one that was never disturbed."""
    x, y = data()
    results = []
    for fault in (None, 3):
        torch.manual_seed(0)
        model, likelihood = problem()
        mll = tighter_gp.TighterELBO(likelihood, model, N)
        optimizer = torch.optim.Adam([*model.parameters(), *likelihood.parameters()], lr=0.05)
        step = 0
        while step < 6:
            with monkeypatch.context() as patch:
                faults = Faults(patch, {fault})
                faults.step, before = step, parameters(model, likelihood)
                optimizer.zero_grad()
                if step == fault:
                    with pytest.raises(NotPSDError, match="K_ZZ"):
                        model(x)
                    assert torch.equal(parameters(model, likelihood), before)
                    fault = None
                    continue
                (-mll(model(x), y)).backward()
                optimizer.step()
                step += 1
        results.append(parameters(model, likelihood))
    assert torch.equal(*results)
