"""Predictions and their last term: against dense formulas, never negative, the same in chunks and in batches."""

from __future__ import annotations

import copy
import warnings

import gpytorch
import pytest
import torch
from gpytorch.likelihoods import BernoulliLikelihood

import tighter_gp
from tests.tools import dense
from tests.tools.factories import GP, CollapsedGP, make_gp, make_kernel, make_noise
from tests.tools.support import Q_FORMS, LargestOutput, assert_state, double_problem, for_last_term, randomize_q, state

P = double_problem(kernel="matern32")
N, M = len(P.x), len(P.z)
NOISE = 0.07
X_TEST = torch.cat([P.x[:5] + 0.13, P.x[3:5], P.z[1:2], P.x[:1] + 9.0])  # between, on the data, on Z, far away
B = len(X_TEST)
LAST_TERMS = ["drop", "exact", "optimal", "subset", "diagonal"]


def kernel():
    return make_kernel("matern32", P.variance, P.lengthscales)


def sparse(likelihood=None, form="cholesky", at_optimum=True, **kwargs):
    model = randomize_q(make_gp(P.z, kernel(), distribution=Q_FORMS[form], mean=0.3, **kwargs))
    if at_optimum:
        tighter_gp.set_optimal_q(model, likelihood or make_noise(NOISE), P.x, P.y)
    return model


def collapsed(noise=NOISE, **kwargs):
    return CollapsedGP(P.x, P.y, P.z.clone(), kernel(), make_noise(noise), 0.3, **kwargs)


def predict(model, last_term="drop", x=X_TEST, **kwargs):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="last_term='diagonal'")
        if isinstance(model, gpytorch.models.ExactGP) or last_term == "drop":
            return tighter_gp.predict(model, x, last_term, **kwargs)
        return tighter_gp.predict(model, x, last_term, **{"likelihood": make_noise(NOISE), "train_x": P.x, **kwargs})


class Dense:
    """Residual covariances given u, written out."""

    def __init__(self, x=X_TEST, train_x=P.x):
        inverse = torch.linalg.inv(P.Kuu)
        k = lambda a, b: dense.matern32(a, b, P.variance, P.lengthscales)
        residual = lambda a, b: k(a, b) - k(a, P.z) @ inverse @ k(P.z, b)
        self.D, self.r, self.test = residual(train_x, train_x), residual(train_x, x), residual(x, x).diagonal()

    @property
    def d(self):
        return self.D.diagonal()

    def reduction(self, m, rows=None, noise=None):
        """Return r' R^-T (I - M) R^-1 r with R = S^1/2 (S^-1/2 D S^-1/2)^1/2, for all or some of the training points."""
        rows = torch.arange(len(self.D)) if rows is None else rows
        noise = torch.ones(len(self.D)) if noise is None else noise
        stddev = noise[rows].sqrt()
        values, vectors = torch.linalg.eigh(self.D[rows][:, rows] / stddev.outer(stddev))
        h = (vectors / values.sqrt()) @ vectors.T @ (self.r[rows] / stddev.unsqueeze(-1))
        return ((1 - m[rows]).unsqueeze(-1) * h**2).sum(0)


# -- the term that is always there --------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", Q_FORMS)
def test_drop_is_what_the_model_predicts(form):
    model = sparse(form=form, at_optimum=False, jitter_val=1e-4)
    expected, q = predict(model), model.eval()(X_TEST)
    torch.testing.assert_close(expected.mean, q.mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(expected.variance, q.variance, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("noise", [NOISE, torch.linspace(0.02, 0.5, N, dtype=torch.float64)], ids=["one", "fixed"])
def test_the_mean_of_a_collapsed_model_is_gpytorchs_without_its_diagonal_correction(noise):
    # With the correction GPyTorch predicts from Q + diag(d) + noise, not from the Q + noise that it trains.
    model = collapsed(noise)
    with gpytorch.settings.sgpr_diagonal_correction(False):
        expected = model.eval()(X_TEST).mean
    torch.testing.assert_close(predict(model).mean, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("noise", [NOISE, torch.linspace(0.02, 0.5, N, dtype=torch.float64)], ids=["one", "fixed"])
def test_drop_of_a_collapsed_model_is_the_dense_formula(noise):
    noises, k = torch.as_tensor(noise).expand(N), lambda a, b: dense.matern32(a, b, P.variance, P.lengthscales)
    q = predict(collapsed(noise))
    system = torch.linalg.inv(P.Kuu + (P.Kuf / noises) @ P.Kuf.T)
    cross = k(P.z, X_TEST)
    mean = 0.3 + cross.T @ system @ P.Kuf @ ((P.y - 0.3) / noises)
    variance = Dense().test + (cross * (system @ cross)).sum(0)
    torch.testing.assert_close(q.mean, mean, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(q.variance, variance, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("last_term", LAST_TERMS)
def test_collapsed_and_uncollapsed_models_agree_at_the_optimal_q(last_term):
    one, other = predict(collapsed(), last_term, subset=3), predict(sparse(), last_term, subset=3)
    torch.testing.assert_close(one.mean, other.mean, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(one.variance, other.variance, rtol=1e-8, atol=1e-9)


# -- the last term ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("conditional", ["optimal", "beta", "scalar", "per_point"])
@pytest.mark.parametrize("rows", [None, torch.tensor([0, 3, 16, 7])], ids=["exact", "subset"])
def test_the_exact_term_is_the_dense_one(conditional, rows):
    given = tighter_gp.PerPoint(N) if conditional == "per_point" else conditional
    model, reference = sparse(conditional=given), Dense()
    own = model.variational_strategy.conditional
    if conditional == "beta":
        own.beta = 0.25
        m = 0.25 / (0.25 + reference.d)
    elif conditional == "scalar":
        own.m = 0.4
        m = torch.full((N,), 0.4)
    elif conditional == "per_point":
        m = own.m = torch.linspace(0.1, 0.9, N)
    else:
        m = NOISE / (NOISE + reference.d)
    kwargs = {} if rows is None else {"subset": rows}
    if conditional != "optimal":
        kwargs["likelihood"] = None  # the model has the scales
    actual = predict(model, "exact" if rows is None else "subset", **kwargs)
    expected = predict(model).variance - reference.reduction(m, rows)
    torch.testing.assert_close(actual.variance, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("last_term", ["exact", "subset", "diagonal"])
def test_titsias_bound_keeps_the_prior_conditional_and_has_no_last_term(last_term):
    model = collapsed(bound="titsias")
    torch.testing.assert_close(predict(model, last_term).variance, predict(model).variance)
    assert (predict(collapsed()).variance - predict(collapsed(), last_term).variance).max() > 1e-3


def test_the_scalar_conditional_keeps_its_share_of_what_the_data_would_explain():
    model, reference = sparse(conditional="scalar"), Dense()
    explained = (reference.r * (torch.linalg.inv(reference.D) @ reference.r)).sum(0)
    m = model.variational_strategy.conditional.m
    expected = predict(model).variance - (1 - m) * explained
    torch.testing.assert_close(predict(model, "exact").variance, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("last_term", ["exact", "optimal", "subset"])
def test_fixed_noise_has_one_scale_per_point(last_term):
    noise, reference = torch.linspace(0.02, 0.5, N), Dense()
    likelihood = make_noise(noise)
    model = sparse(likelihood)
    rows = torch.tensor([0, 3, 16, 7])
    if last_term == "optimal":
        inverse = torch.linalg.inv(reference.D + torch.diag(noise))
        reduction = (reference.r * (inverse @ reference.r)).sum(0)
    else:
        m = noise / (noise + reference.d)
        reduction = reference.reduction(m, rows if last_term == "subset" else None, noise)
    expected = predict(model).variance - reduction
    actual = predict(model, last_term, likelihood=likelihood, subset=rows)
    torch.testing.assert_close(actual.variance, expected, rtol=1e-9, atol=1e-10)
    given = predict(model, last_term, likelihood=make_noise(torch.ones(3)), noise=noise, subset=rows)
    torch.testing.assert_close(given.variance, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("last_term", ["exact", "optimal", "subset", "local"])
@pytest.mark.parametrize("policy", ["mask", "fill"])
def test_training_points_without_a_target_explain_nothing(last_term, policy):
    noise, missing = torch.linspace(0.02, 0.5, N), torch.arange(N) % 3 == 1
    model = CollapsedGP(P.x, torch.where(missing, torch.nan, P.y), P.z.clone(), kernel(), make_noise(noise), 0.3)
    x = torch.cat([X_TEST, P.x[missing][:3] + 0.01])
    reference, seen = Dense(x, P.x[~missing]), noise[~missing]
    m, subset = seen / (seen + reference.d), 16
    if last_term == "optimal":
        inverse = torch.linalg.inv(reference.D + torch.diag(seen))
        reduction = (reference.r * (inverse @ reference.r)).sum(0)
    elif last_term == "local":
        subset = N - 2  # more than are seen
        reduction = reference.reduction(m, noise=seen)
    elif last_term == "subset":
        subset = torch.tensor([0, 4, 3, -2, 5])  # of all training points, 4 without a target
        places = [(~missing)[: row % N].sum() for row in (0, 3, -2, 5)]
        reduction = reference.reduction(m, torch.stack(places), seen)
    else:
        reduction = reference.reduction(m, noise=seen)
    with gpytorch.settings.observation_nan_policy(policy):
        drop = predict(model, x=x)
        actual = predict(model, "subset" if last_term == "local" else last_term, x, subset=subset)
    torch.testing.assert_close(actual.mean, drop.mean, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(actual.variance, drop.variance - reduction, rtol=1e-8, atol=1e-9)
    assert (reduction > 1e-3).any()


@pytest.mark.parametrize("last_term", ["exact", "optimal", "subset"])
def test_training_points_that_have_no_target_at_all_explain_nothing(last_term):
    model = CollapsedGP(P.x, torch.full((N,), torch.nan), P.z.clone(), kernel(), make_noise(NOISE), 0.3)
    with gpytorch.settings.observation_nan_policy("fill"):
        torch.testing.assert_close(predict(model, last_term).variance, predict(model).variance)


def test_the_last_term_needs_the_same_targets_in_every_member_of_a_batch():
    y = torch.stack([P.y, P.y + 1.0])
    y[1, 3] = torch.nan
    model = CollapsedGP(P.x.expand(2, N, -1), y, P.z.clone(), kernel(), make_noise(NOISE))
    with gpytorch.settings.observation_nan_policy("fill"):
        assert torch.isfinite(predict(model).variance).all()
        with pytest.raises(ValueError, match="the same rows in every model of the batch"):
            predict(model, "exact")


def test_a_local_subset_is_the_most_correlated_training_points_of_each_test_point():
    reference = Dense()
    m = NOISE / (NOISE + reference.d)
    correlation = reference.r**2 / reference.d.unsqueeze(-1)
    expected = torch.stack(
        [reference.reduction(m, correlation[:, i].argsort(descending=True)[:4])[i] for i in range(B)]
    )
    for model in (sparse(), collapsed()):
        actual = predict(model).variance - predict(model, "subset", subset=4).variance
        torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("subset", [N, N + 50])
def test_a_subset_of_all_points_is_exact(subset):
    for model in (sparse(), collapsed(), sparse(conditional="beta")):
        actual, expected = predict(model, "subset", subset=subset), predict(model, "exact")
        torch.testing.assert_close(actual.variance, expected.variance, rtol=1e-9, atol=1e-10)


def test_no_variance_is_negative_and_none_is_above_drop():
    for seed in range(15):
        p = dense.problem(seed, kernel="matern32" if seed % 2 else "rbf")
        likelihood = make_noise(1e-3)
        model = make_gp(p.z, make_kernel(p.kernel, p.variance, p.lengthscales))
        tighter_gp.set_optimal_q(model, likelihood, p.x, p.y)
        x = torch.cat([3 * torch.rand(40, 2), p.x, p.z])
        drop = tighter_gp.predict(model, x).variance
        for last_term in ("exact", "optimal", "subset"):
            q = tighter_gp.predict(model, x, last_term, likelihood=likelihood, train_x=p.x, subset=4)
            variance = q.lazy_covariance_matrix.diagonal(dim1=-1, dim2=-2)  # .variance rounds up
            assert variance.min() >= 0
            assert (variance <= drop + 1e-10).all()


def test_inducing_points_on_the_data_make_a_singular_residual_that_is_no_problem():
    likelihood = make_noise(NOISE)
    model = make_gp(torch.cat([P.x[:4], P.z]), kernel())
    tighter_gp.set_optimal_q(model, likelihood, P.x, P.y)
    x = torch.cat([P.x, P.x[:3]])  # training points twice: D has rows of zeros and rows that repeat
    variances = {
        last_term: tighter_gp.predict(
            model, X_TEST, last_term, subset=6, **for_last_term(last_term, likelihood=likelihood, train_x=x)
        ).variance
        for last_term in ("drop", "exact", "optimal", "subset")
    }
    for variance in variances.values():
        assert torch.isfinite(variance).all()
        assert (variance <= variances["drop"] + 1e-10).all()


def test_the_diagonal_term_is_the_dense_one_clamped_with_a_warning():
    x = X_TEST[[0, 1, 2, 4, 6, 8]]
    reference = Dense(x)
    reduction = (reference.r**2 / (reference.d + NOISE).unsqueeze(-1)).sum(0)
    negative = int((reduction > reference.test).sum())
    assert 0 < negative < len(x)
    message = f"negative at {negative} of {len(x)} test points; it was clamped to zero there. Use last_term='subset'"
    for model, given in ((sparse(), {"likelihood": make_noise(NOISE), "train_x": P.x}), (collapsed(), {})):
        with pytest.warns(UserWarning, match=message):
            actual = tighter_gp.predict(model, x, "diagonal", **given, batch_size=4)
        expected = predict(model, x=x).variance - torch.minimum(reduction, reference.test)
        torch.testing.assert_close(actual.variance, expected, rtol=1e-9, atol=1e-10)


# -- chunks, batches, precision -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("last_term", LAST_TERMS)
@pytest.mark.parametrize("batch_size", [1, 4, B])
def test_chunks_are_the_whole(last_term, batch_size):
    for model in (sparse(), collapsed()):
        whole, parts = (predict(model, last_term, subset=3, batch_size=size) for size in (1024, batch_size))
        torch.testing.assert_close(parts.mean, whole.mean, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(parts.variance, whole.variance, rtol=1e-9, atol=1e-11)


BATCH = torch.Size([3])
SCALES, LENGTHS, NOISES = [0.5, 1.0, 2.0], [[0.6, 0.8], [1.0, 1.2], [0.9, 0.7]], [0.1, 0.2, 0.05]


def batch_of_gps(z):
    base = gpytorch.kernels.MaternKernel(1.5, ard_num_dims=2, batch_shape=BATCH)
    covar = gpytorch.kernels.ScaleKernel(base, batch_shape=BATCH)
    covar.outputscale, base.lengthscale = torch.tensor(SCALES), torch.tensor(LENGTHS).unsqueeze(-2)
    likelihood = gpytorch.likelihoods.GaussianLikelihood(batch_shape=BATCH)
    likelihood.noise = torch.tensor(NOISES).unsqueeze(-1)
    return make_gp(z, covar, batch_shape=BATCH), likelihood


@pytest.mark.parametrize("last_term", LAST_TERMS)
@pytest.mark.parametrize("own_points", [False, True])
@pytest.mark.parametrize("subset", [3, torch.tensor([0, 5, 7])], ids=["local", "given"])
def test_a_batch_of_gps_predicts_as_its_members(last_term, own_points, subset):
    z = P.z + 0.1 * torch.randn(3, M, 2) if own_points else P.z
    y = P.y + torch.randn(3, N)
    model, likelihood = batch_of_gps(z)
    tighter_gp.set_optimal_q(model, likelihood, P.x, y)
    given = for_last_term(last_term, likelihood=likelihood)
    together = predict(model, last_term, **given, subset=subset, batch_size=4)
    assert together.batch_shape == BATCH
    for i in range(3):
        noise = make_noise(NOISES[i])
        single = make_gp(z[i] if own_points else z, make_kernel("matern32", SCALES[i], torch.tensor(LENGTHS[i])))
        tighter_gp.set_optimal_q(single, noise, P.x, y[i])
        alone = predict(single, last_term, **for_last_term(last_term, likelihood=noise), subset=subset)
        torch.testing.assert_close(together.mean[i], alone.mean, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(together.variance[i], alone.variance, rtol=1e-8, atol=1e-10)


def test_many_points_take_the_memory_of_the_answer_and_one_chunk():
    model, x = sparse(), torch.rand(100_000, 2)
    with LargestOutput() as seen:
        q = tighter_gp.predict(model, x, batch_size=1000)
    assert q.mean.shape == q.variance.shape == (100_000,)
    assert seen.largest <= x.numel()


def test_the_warning_counts_the_points_of_all_members():
    model, likelihood = batch_of_gps(P.z)
    with pytest.warns(UserWarning, match=rf"negative at \d+ of {3 * B} test points"):
        tighter_gp.predict(model, X_TEST, "diagonal", likelihood=likelihood, train_x=P.x)


@pytest.mark.parametrize("last_term", ["drop", "exact", "optimal", "subset"])
def test_a_float32_model_predicts_in_float32_what_float64_does(last_term):
    model = sparse(jitter_val=1e-4)
    expected = predict(model, last_term, subset=3)
    narrow = sparse(jitter_val=1e-4).float()
    given = for_last_term(last_term, likelihood=make_noise(NOISE).float(), train_x=P.x.float())
    actual = tighter_gp.predict(narrow, X_TEST.float(), last_term, **given, subset=3)
    assert actual.mean.dtype == actual.variance.dtype == torch.float32
    torch.testing.assert_close(actual.mean.double(), expected.mean, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(actual.variance.double(), expected.variance, rtol=1e-3, atol=1e-4)


class LargestDouble(LargestOutput):
    """Size of the largest tensor of float64."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = self.largest
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if getattr(out, "dtype", None) != torch.float64:
            self.largest = before
        return out


class Plain(gpytorch.kernels.RBFKernel):
    """Not lowered."""


def large_kernel(base=gpytorch.kernels.RBFKernel):
    """Rounding in float32 is larger than the noise."""
    scaled = gpytorch.kernels.ScaleKernel(base())
    scaled.outputscale, scaled.base_kernel.lengthscale = 1e6, 1.1
    return scaled


def large_solve_gp():
    distributions = [Q_FORMS["cholesky"](3), Q_FORMS["cholesky"](2)]
    make = lambda model: tighter_gp.SolveGPVariationalStrategy(
        model, P.z[:3], P.z[3:5], *distributions, jitter_val=1e-4
    )
    return GP(make, large_kernel())


LARGE = {
    "svgp": lambda: make_gp(P.z, large_kernel(), jitter_val=1e-4),
    "svgp, kernel not lowered": lambda: make_gp(P.z, large_kernel(Plain), jitter_val=1e-4),
    "solve-gp": large_solve_gp,
    "collapsed": lambda: CollapsedGP(P.x, 1e3 * P.y, P.z.clone(), large_kernel(), make_noise(1e-2)),
    "chunked": lambda: tighter_gp.CollapsedGP(P.x, 1e3 * P.y, P.z, large_kernel(), make_noise(1e-2)),
}


@pytest.mark.filterwarnings("ignore:last_term='diagonal'")
@pytest.mark.parametrize("last_term", LAST_TERMS)
@pytest.mark.parametrize("name", LARGE)
def test_a_large_outputscale_in_float32_is_predicted_as_in_float64(name, last_term):
    model, likelihood = LARGE[name]().float(), make_noise(1e-2).float()
    if isinstance(model, GP):
        tighter_gp.set_optimal_q(model, likelihood, P.x.float(), 1e3 * P.y.float())
    found = []
    for dtype in (torch.float32, torch.float64):
        given = {}
        if isinstance(model, GP):
            given = for_last_term(last_term, likelihood=likelihood.to(dtype), train_x=P.x.float().to(dtype))
        x = X_TEST.float().to(dtype)
        found.append(tighter_gp.predict(copy.deepcopy(model).to(dtype), x, last_term, subset=4, **given))
    narrow, wide = found
    assert narrow.mean.dtype == narrow.variance.dtype == torch.float32
    torch.testing.assert_close(narrow.mean.double(), wide.mean, rtol=1e-4, atol=1e-1)
    torch.testing.assert_close(narrow.variance.double(), wide.variance, rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("make", [sparse, collapsed])
def test_dropping_the_term_evaluates_no_kernel_in_float64_where_float32_suffices(make):
    model = make(jitter_val=1e-4).float()
    x = torch.rand(50, 2).float()
    with LargestDouble() as seen:
        tighter_gp.predict(model, x)
    assert seen.largest <= M * M
    given = {"likelihood": make_noise(NOISE).float(), "train_x": P.x.float()} if make is sparse else {}
    with LargestDouble() as seen:
        tighter_gp.predict(model, x, "exact", **given)
    assert seen.largest >= 50 * M


def test_one_dimensional_inputs():
    x = torch.linspace(0, 3, 9)
    model = make_gp(torch.linspace(0, 3, 4).unsqueeze(-1))
    likelihood = make_noise(0.1)
    tighter_gp.set_optimal_q(model, likelihood, x.unsqueeze(-1), x.sin())
    flat = tighter_gp.predict(model, x + 0.1, "exact", likelihood=likelihood, train_x=x)
    column = tighter_gp.predict(model, x.unsqueeze(-1) + 0.1, "exact", likelihood=likelihood, train_x=x.unsqueeze(-1))
    assert torch.equal(flat.variance, column.variance)


# -- what it leaves behind ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [sparse, collapsed])
@pytest.mark.parametrize("training", [True, False])
def test_predicting_leaves_the_model_as_it_was(make, training):
    model = make().train(training)
    model.mean_module.train(not training)
    modes, before = [module.training for module in model.modules()], state(model)
    q = predict(model, "exact")
    assert [module.training for module in model.modules()] == modes
    assert_state(model, before)
    assert not q.mean.requires_grad
    assert not q.variance.requires_grad


@pytest.mark.parametrize("make", [sparse, collapsed])
@pytest.mark.parametrize("training", [True, False])
def test_predictions_follow_a_changed_hyperparameter(make, training):
    def changed(model):
        covar = model.covar_module if make is sparse else model.covar_module.base_kernel
        covar.outputscale = 2.7
        return model

    model = make().train(training)
    predict(model)
    actual, expected = predict(changed(model), "exact"), predict(changed(make()), "exact")
    torch.testing.assert_close(actual.mean, expected.mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(actual.variance, expected.variance, rtol=1e-12, atol=1e-12)


def test_predicting_leaves_the_collapsed_models_own_gradients_alone():
    def gradient(model):
        return torch.autograd.grad(model.eval()(X_TEST).mean.sum(), model.covar_module.base_kernel.raw_outputscale)[0]

    model = collapsed().eval()
    predict(model, "exact")
    torch.testing.assert_close(gradient(model), gradient(collapsed()))


def test_the_likelihood_adds_its_noise():
    likelihood = make_noise(NOISE)
    q = predict(sparse(likelihood), "optimal")
    torch.testing.assert_close(likelihood(q).variance, q.variance + NOISE)


# -- bad input ----------------------------------------------------------------------------------------------------------

LIKELIHOOD = {"likelihood": make_noise(NOISE)}
BAD_CALLS = {
    "unknown": ("last", {}, ValueError, "Unknown last_term 'last'; choose 'drop', 'exact', 'optimal', 'subset', 'diagonal'"),
    "likelihood as x": ("drop", {"x": make_noise(NOISE)}, TypeError, r"got GaussianLikelihood: call predict\(model, x\)"),
    "no train_x": ("exact", {"train_x": None}, ValueError, "needs the training inputs: pass train_x="),
    "no likelihood": ("exact", {"likelihood": None}, ValueError, "takes its scales from the noise: pass likelihood="),
    "bernoulli": ("exact", {"likelihood": BernoulliLikelihood()}, TypeError, "Gaussian likelihood; got BernoulliLikelihood"),
    "subset": ("subset", {"subset": 0}, ValueError, "subset must be at least 1; got 0"),
    "batch_size": ("drop", {"batch_size": 0}, ValueError, "at least (1|one).*got 0"),
    "noise": ("exact", {"likelihood": make_noise(torch.ones(3))}, ValueError, "got 3 stored noise variances for a batch of 17"),
    "nan": ("drop", {"x": X_TEST / 0}, ValueError, f"NaN or infinity in {B} of {B} rows"),
}  # fmt: skip


@pytest.mark.parametrize(("last_term", "kwargs", "error", "message"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_bad_calls(last_term, kwargs, error, message):
    model = sparse()
    before = state(model)
    with pytest.raises(error, match=message):
        predict(model, last_term, **kwargs)
    assert_state(model, before)
    assert model.training


UNUSED = {
    "likelihood": lambda: make_noise(NOISE),
    "train_x": lambda: P.x,
    "noise": lambda: torch.full((3,), 9.0),
}


@pytest.mark.parametrize("name", UNUSED)
def test_what_only_a_last_term_takes_is_refused_without_one(name):
    for model in (sparse(), collapsed(), make_gp(P.z, strategy=gpytorch.variational.VariationalStrategy)):
        with pytest.raises(TypeError, match=rf"last_term='drop' needs no more: leave out {name}="):
            tighter_gp.predict(model, X_TEST, **{name: UNUSED[name]()})


@pytest.mark.parametrize("name", UNUSED)
@pytest.mark.parametrize("last_term", ["exact", "optimal", "subset", "diagonal"])
def test_a_collapsed_model_takes_no_other_data_than_its_own(name, last_term):
    chunked = tighter_gp.CollapsedGP(P.x, P.y, P.z, kernel(), make_noise(NOISE))
    for model in (collapsed(), chunked):
        with pytest.raises(TypeError, match=rf"A collapsed model has its own data and likelihood: leave out {name}="):
            tighter_gp.predict(model, X_TEST, last_term, **{name: UNUSED[name]()})


def test_a_collapsed_model_may_be_given_its_own_likelihood():
    for model in (collapsed(), tighter_gp.CollapsedGP(P.x, P.y, P.z, kernel(), make_noise(NOISE))):
        given = tighter_gp.predict(model, X_TEST, "exact", likelihood=model.likelihood)
        assert torch.equal(given.variance, tighter_gp.predict(model, X_TEST, "exact").variance)


def test_inputs_of_another_dimension():
    for model in (sparse(), collapsed()):
        with pytest.raises(ValueError, match=r"2.*got \(9, 1\)"):
            predict(model, x=X_TEST[:, :1])


def test_the_optimal_term_is_for_gaussian_noise():
    with pytest.raises(ValueError, match="'optimal' is for Gaussian noise; use 'exact' or 'subset'"):
        predict(sparse(conditional="beta"), "optimal")


def test_the_last_term_of_a_model_of_another_make():
    with pytest.raises(TypeError, match=r"one of tighter_gp's.*got GP with VariationalStrategy"):
        tighter_gp.predict(make_gp(P.z, strategy=gpytorch.variational.VariationalStrategy), X_TEST, "exact")
    model = collapsed()
    model.covar_module = model.covar_module.base_kernel
    with pytest.raises(TypeError, match=r"TighterInducingPointKernel as its covar_module.* got ScaleKernel"):
        tighter_gp.predict(model, X_TEST, "exact")
