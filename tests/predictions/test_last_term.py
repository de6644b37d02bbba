"""The last term of the predictive variance: against dense formulas, never negative, the same in batches."""

from __future__ import annotations

import copy

import gpytorch
import pytest
import torch
from gpytorch.likelihoods import BernoulliLikelihood

import tighter_gp
from tests.tools import dense
from tests.tools.factories import GP, CollapsedGP, make_gp, make_kernel, make_noise
from tests.tools.support import Q_FORMS, assert_state, double_problem, for_last_term, randomize_q, state

P = double_problem(kernel="matern32")
N, M = len(P.x), len(P.z)
NOISE = 0.07
X_TEST = torch.cat([P.x[:5] + 0.13, P.x[3:5], P.z[1:2], P.x[:1] + 9.0])  # between, on the data, on Z, far away
B = len(X_TEST)
LAST_TERMS = ["drop", "exact", "optimal", "subset"]


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


@pytest.mark.parametrize("last_term", ["exact", "subset"])
def test_titsias_bound_keeps_the_prior_conditional_and_has_no_last_term(last_term):
    model = collapsed(bound="titsias")
    torch.testing.assert_close(predict(model, last_term).variance, predict(model).variance)
    assert (predict(collapsed()).variance - predict(collapsed(), last_term).variance).max() > 1e-3


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


def large_kernel(base=gpytorch.kernels.RBFKernel):
    """Rounding in float32 is larger than the noise."""
    scaled = gpytorch.kernels.ScaleKernel(base())
    scaled.outputscale, scaled.base_kernel.lengthscale = 1e6, 1.1
    return scaled


LARGE = {
    "svgp": lambda: make_gp(P.z, large_kernel(), jitter_val=1e-4),
    "collapsed": lambda: CollapsedGP(P.x, 1e3 * P.y, P.z.clone(), large_kernel(), make_noise(1e-2)),
    "chunked": lambda: tighter_gp.CollapsedGP(P.x, 1e3 * P.y, P.z, large_kernel(), make_noise(1e-2)),
}


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


BAD_CALLS = {
    "unknown": ("last", {}, ValueError, "Unknown last_term 'last'; choose 'drop', 'exact', 'optimal', 'subset'"),
    "no train_x": ("exact", {"train_x": None}, ValueError, "needs the training inputs: pass train_x="),
    "no likelihood": ("exact", {"likelihood": None}, ValueError, "takes its scales from the noise: pass likelihood="),
    "bernoulli": ("exact", {"likelihood": BernoulliLikelihood()}, TypeError, "Gaussian likelihood; got BernoulliLikelihood"),
    "noise": ("exact", {"likelihood": make_noise(torch.ones(3))}, ValueError, "got 3 stored noise variances for a batch of 17"),
}  # fmt: skip


@pytest.mark.parametrize(("last_term", "kwargs", "error", "message"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_bad_calls(last_term, kwargs, error, message):
    model = sparse()
    before = state(model)
    with pytest.raises(error, match=message):
        predict(model, last_term, **kwargs)
    assert_state(model, before)
    assert model.training


def test_other_models_have_no_last_term_and_the_first_takes_no_data():
    with pytest.raises(TypeError, match="are for a last_term"):
        tighter_gp.predict(sparse(), X_TEST, likelihood=make_noise(NOISE))
    with pytest.raises(ValueError, match="'optimal' is for Gaussian noise; use 'exact' or 'subset'"):
        predict(sparse(conditional="beta"), "optimal")
    with pytest.raises(TypeError, match="got GP with VariationalStrategy"):
        predict(make_gp(P.z, strategy=gpytorch.variational.VariationalStrategy), "exact")
