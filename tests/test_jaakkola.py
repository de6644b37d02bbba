"""The Jaakkola bound against dense algebra, brute-force evidences and a case computed with many digits."""

from __future__ import annotations

import copy
import math
import pickle

import gpytorch
import numpy as np
import pytest
import torch

from tests import dense
from tests.factories import make_kernel
from tighter_gp.jaakkola import (
    JaakkolaGPClassifier,
    jaakkola_bound,
    jaakkola_posterior,
    jaakkola_weight,
    optimal_xi,
)
from tighter_gp.likelihoods import BernoulliLogitLikelihood

BOUNDS = ["standard", "tighter"]
# A case computed with 60 digits from the dense definition; labels are -1 and 1.
GOLDEN = {
    "variance": 1.7,
    "lengthscales": [0.8, 1.1],
    "X": [
        [1.706, -1.451],
        [1.563, 1.034],
        [1.911, -0.119],
        [0.95, -1.056],
        [-0.21, 1.99],
        [1.397, -0.721],
        [0.06, 0.18],
        [0.158, 0.235],
        [-1.496, 0.306],
    ],
    "Z": [[1.337, 1.307], [0.273, 0.073], [-1.541, 0.632]],
    "y": [1.0, 1.0, 1.0, -1.0, 1.0, 1.0, -1.0, 1.0, -1.0],
    "xi": [1.353, 2.668, 1.502, 2.697, 1.621, 0.653, 2.01, 2.123, 2.369],
    "omega": [
        0.21775288892793196,
        0.16308537536466336,
        0.2116328759376253,
        0.1619760432119002,
        0.20662121891552712,
        0.24147961259289497,
        0.1899716528312092,
        0.18517128621575704,
        0.1749399102596173,
    ],
    "d": [
        1.6890301428500085,
        0.22351260198251624,
        1.5066814929862768,
        1.4091986575608433,
        1.610687172934087,
        1.5339461925357172,
        0.12156674278778083,
        0.06865367953695295,
        0.14710187869151745,
    ],
    "m": [
        0.731105745563005,
        0.96483035454228,
        0.7582286743285347,
        0.8141622397068123,
        0.7502989114164271,
        0.7297050425770969,
        0.9774270695060447,
        0.987446893608588,
        0.9749116342815838,
    ],
    "jj_standard": -7.60984758641906,
    "jj_tight": -7.499104958182281,
    "q_u_mean": [1.01594899924693, 0.16670750694344033, -0.5864858182220308],
    "q_u_cov": [
        [1.2960619823304846, 0.1701174797217184, -0.009758452969541363],
        [0.1701174797217184, 0.9965433675997177, 0.02547088009641348],
        [-0.009758452969541363, 0.02547088009641348, 1.3277012362752636],
    ],
}


def problem(seed: int = 0, n: int = 17, m: int = 5, mean: float = 0.0):
    """Dense matrices, labels drawn from the prior, and a prior mean that varies from point to point."""
    p = dense.problem(seed, n, m, kernel="matern32")
    generator = torch.Generator().manual_seed(seed)
    mu = mean * (1 + torch.rand(n, generator=generator))
    f = 2 * p.y + mu
    labels = torch.where(torch.rand(n, generator=generator) < torch.sigmoid(f), 1.0, -1.0)
    xi = 0.2 + 2 * torch.rand(n, generator=generator)
    three = {name: 3 * getattr(p, name) for name in ("Kuu", "Kuf", "Kff", "Q", "D", "variance")}
    return p._replace(**three), (labels, xi, mu)


def whitened(p: dense.Problem) -> torch.Tensor:
    return torch.linalg.inv(torch.linalg.cholesky(p.Kuu)) @ p.Kuf


def dense_bound(p: dense.Problem, labels, xi, mean, bound: str) -> torch.Tensor:
    """The minorant as a Gaussian likelihood N(y / 2w; f, 1/w): its evidence under the explained part of the prior."""
    weight = torch.tanh(xi / 2) / (2 * xi)
    constant = torch.log(torch.sigmoid(xi)) - xi / 2 + weight * xi**2 / 2 + 1 / (8 * weight)
    constant = constant + 0.5 * torch.log(2 * math.pi / weight)
    price = torch.log(1 + weight * p.d) if bound == "tighter" else weight * p.d
    evidence = dense.log_normal(labels / (2 * weight) - mean, p.Q + torch.diag(1 / weight))
    return constant.sum() + evidence - 0.5 * price.sum()


def log_evidence(Kff, labels, mean, order: int = 12) -> torch.Tensor:
    """Gauss-Hermite quadrature over five whitened latents."""
    nodes, weights = gauss_hermite(order)
    grid = torch.cartesian_prod(*[nodes] * 5)
    log_weight = torch.cartesian_prod(*[weights.log()] * 5).sum(-1)
    f = mean + grid @ torch.linalg.cholesky(Kff).T
    return torch.logsumexp(log_weight + torch.nn.functional.logsigmoid(labels * f).sum(-1), 0)


def gauss_hermite(order: int):
    """Nodes and weights for a standard normal."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(order)
    return torch.as_tensor(nodes), torch.as_tensor(weights / weights.sum())


def ascend(arguments, mean, bound: str, steps: int = 300):
    projection, residual, labels, xi = arguments
    for _ in range(steps):
        xi = optimal_xi(projection, residual, labels, xi, mean, bound=bound)
    return xi


# -- values -------------------------------------------------------------------------------------------------------------


def test_the_golden_case():
    X, Z, y, xi = (torch.tensor(GOLDEN[name]) for name in ("X", "Z", "y", "xi"))
    kernel = make_kernel("rbf", GOLDEN["variance"], torch.tensor(GOLDEN["lengthscales"]))
    model = JaakkolaGPClassifier(X, y, Z, kernel, jitter_val=0.0)
    projection, residual, _, _, mean = model._problem()
    posterior = jaakkola_posterior(projection, y, xi, mean)
    root = torch.linalg.cholesky(kernel(Z).to_dense()) @ posterior.root
    close = lambda value, name: torch.testing.assert_close(value, torch.tensor(GOLDEN[name]), rtol=1e-9, atol=1e-12)
    close(jaakkola_weight(xi), "omega")
    close(residual, "d")
    close(1 / (1 + jaakkola_weight(xi) * residual), "m")
    close(jaakkola_bound(projection, residual, y, xi, bound="standard"), "jj_standard")
    close(jaakkola_bound(projection, residual, y, xi), "jj_tight")
    close(torch.linalg.cholesky(kernel(Z).to_dense()) @ posterior.mean, "q_u_mean")
    close(root @ root.T, "q_u_cov")


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("mean", [0.0, -0.7])
@pytest.mark.parametrize("seed", range(3))
def test_the_bound_is_the_dense_one_with_and_without_a_prior_mean(seed, mean, bound):
    p, (labels, xi, mu) = problem(seed, mean=mean)
    value = jaakkola_bound(whitened(p), p.d, labels, xi, mu, bound=bound)
    torch.testing.assert_close(value, dense_bound(p, labels, xi, mu, bound), rtol=1e-10, atol=0)


@pytest.mark.parametrize("bound", BOUNDS)
def test_the_gradients_are_those_of_the_dense_bound(bound):
    p, (labels, xi, mu) = problem(4, mean=0.6)
    gradients = []
    for function in (
        lambda Kuu, Kuf, xi, mu: jaakkola_bound(
            torch.linalg.solve_triangular(torch.linalg.cholesky(Kuu), Kuf, upper=False),
            p.Kff.diagonal() - (Kuf * torch.linalg.solve(Kuu, Kuf)).sum(0),
            *(labels, xi, mu),
            bound=bound,
        ),
        lambda Kuu, Kuf, xi, mu: dense_bound(
            p._replace(Q=(Q := Kuf.T @ torch.linalg.inv(Kuu) @ Kuf), D=p.Kff - Q), labels, xi, mu, bound
        ),
    ):
        leaves = [t.clone().requires_grad_() for t in (p.Kuu, p.Kuf, xi, mu)]
        gradients.append(torch.autograd.grad(function(*leaves), leaves))
    symmetric = lambda g: [(g[0] + g[0].T) / 2, *g[1:]]
    for ours, theirs in zip(*map(symmetric, gradients), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9)


def test_the_collapsed_bound_is_the_minorant_at_the_optimal_q():
    """KL and expectation written out at q(w), with f of variance s + m d."""
    p, (labels, xi, mu) = problem(2, mean=0.8)
    A, weight = whitened(p), jaakkola_weight(xi)
    q = jaakkola_posterior(A, labels, xi, mu)
    S, m = q.root @ q.root.T, 1 / (1 + weight * p.d)
    first, second = mu + A.T @ q.mean, (A.T @ S @ A).diagonal() + m * p.d
    second = second + first**2
    minorant = torch.log(torch.sigmoid(xi)) + (labels * first - xi) / 2 - weight * (second - xi**2) / 2
    kl = dense.kl(q.mean, S, torch.zeros(5), torch.eye(5)) + 0.5 * (m - 1 - m.log()).sum()
    torch.testing.assert_close(jaakkola_bound(A, p.d, labels, xi, mu), minorant.sum() - kl)


@pytest.mark.parametrize("mean", [0.0, 0.9])
@pytest.mark.parametrize("seed", range(4))
def test_standard_below_tighter_below_the_brute_force_evidence(seed, mean):
    p, (labels, xi, mu) = problem(seed, n=5, m=2, mean=mean)
    exact, coarse = (log_evidence(p.Kff, labels, mu, order) for order in (12, 10))
    assert abs(exact - coarse) < 1e-3
    values = [
        jaakkola_bound(A, p.d, labels, ascend((A, p.d, labels, xi), mu, bound), mu, bound=bound)
        for A in [whitened(p)]
        for bound in BOUNDS
    ]
    assert values[0] < values[1] < exact - 2e-3


def test_any_xi_gives_a_bound():
    p, (labels, _, mu) = problem(1, n=5, m=2, mean=-0.4)
    exact = log_evidence(p.Kff, labels, mu)
    for xi in (torch.zeros(5), torch.full((5,), 30.0), torch.tensor([0.1, -3.0, 1e-9, 7.0, 1.0])):
        standard, tighter = (jaakkola_bound(whitened(p), p.d, labels, xi, mu, bound=bound) for bound in BOUNDS)
        assert standard <= tighter < exact


@pytest.mark.parametrize("seed", range(3))
def test_the_minorant_costs_something_against_the_true_likelihood_at_the_same_q(seed):
    p, (labels, xi, mu) = problem(seed, mean=0.5)
    A = whitened(p)
    xi = ascend((A, p.d, labels, xi), mu, "tighter")
    q, m = jaakkola_posterior(A, labels, xi, mu), 1 / (1 + jaakkola_weight(xi) * p.d)
    S = q.root @ q.root.T
    nodes, weights = gauss_hermite(60)
    stddev = ((A.T @ S @ A).diagonal() + m * p.d).sqrt()
    f = (mu + A.T @ q.mean).unsqueeze(-1) + stddev.unsqueeze(-1) * nodes
    expected = (torch.nn.functional.logsigmoid(labels.unsqueeze(-1) * f) * weights).sum()
    kl = dense.kl(q.mean, S, torch.zeros(5), torch.eye(5)) + 0.5 * (m - 1 - m.log()).sum()
    assert jaakkola_bound(A, p.d, labels, xi, mu) < expected - kl


# -- xi -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_weight_and_its_slope_are_smooth_at_zero(dtype):
    xi = torch.tensor([0.0, 1e-8, 0.019, 0.02, 0.021, 3.0, 200.0], dtype=dtype, requires_grad=True)
    weight = jaakkola_weight(xi)
    exact = xi.detach().double()
    expected = torch.where(exact == 0, 0.25, torch.tanh(exact / 2) / (2 * exact.clamp_min(1e-300)))
    torch.testing.assert_close(weight.double(), expected, rtol=4 * torch.finfo(dtype).eps, atol=0)
    (slope,) = torch.autograd.grad(weight.sum(), xi)
    near_zero = -exact / 24 + exact**3 / 240
    torch.testing.assert_close(slope[:5].double(), near_zero[:5], rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("seed", range(3))
def test_coordinate_ascent_never_lowers_the_bound_and_ends_at_a_stationary_point(seed, bound):
    p, (labels, xi, mu) = problem(seed, mean=-1.1)
    arguments = whitened(p), p.d, labels
    values = []
    for _ in range(200):
        values.append(jaakkola_bound(*arguments, xi, mu, bound=bound))
        xi = optimal_xi(*arguments, xi, mu, bound=bound)
    assert (torch.stack(values).diff() > -1e-12).all()
    assert values[-1] > values[0] + 1e-3
    xi.requires_grad_()
    (gradient,) = torch.autograd.grad(jaakkola_bound(*arguments, xi, mu, bound=bound), xi)
    assert gradient.abs().max() < 1e-8


def test_one_update_is_the_second_moment_under_q():
    p, (labels, xi, mu) = problem(3, mean=0.5)
    A = whitened(p)
    weight = torch.tanh(xi / 2) / (2 * xi)
    S = torch.linalg.inv(torch.eye(5) + A @ torch.diag(weight) @ A.T)
    mean = mu + A.T @ S @ A @ (labels / 2 - weight * mu)
    for bound, m in (("tighter", 1 / (1 + weight * p.d)), ("standard", 1.0)):
        expected = (mean**2 + (A.T @ S @ A).diagonal() + m * p.d).sqrt()
        torch.testing.assert_close(optimal_xi(A, p.d, labels, xi, mu, bound=bound), expected)


# -- the classifier -----------------------------------------------------------------------------------------------------


def circles(n: int = 61, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    x = 2 * torch.randn(n, 2, generator=generator)
    flip = torch.rand(n, generator=generator) < 0.05
    return x, ((x.square().sum(-1) < 5) ^ flip).double()


def classifier(x, y, m: int = 9, **kwargs) -> JaakkolaGPClassifier:
    kernel = make_kernel("rbf", 2.0, torch.tensor([1.0, 1.2]))
    return JaakkolaGPClassifier(x, y, x[:m], kernel, gpytorch.means.ConstantMean(), **kwargs)


@pytest.mark.parametrize("bound", BOUNDS)
def test_the_classifier_has_the_dense_bound_jitter_and_mean_included(bound):
    x, y = circles()
    model = classifier(x, y, bound=bound, jitter_val=1e-3)
    model.mean_module.initialize(constant=0.4)
    ls = torch.tensor([1.0, 1.2])
    Kuu, Kuf, Kff = (dense.rbf(a, b, 2.0, ls) for a, b in ((x[:9], x[:9]), (x[:9], x), (x, x)))
    Q = Kuf.T @ torch.linalg.inv(Kuu + 1e-3 * torch.eye(9)) @ Kuf
    p = dense.Problem(x, y, x[:9], None, Kuu, Kuf, Kff, Q, Kff - Q, 2.0, ls, "rbf")
    expected = dense_bound(p, 2 * y - 1, torch.ones(61), torch.tensor(0.4), bound)
    torch.testing.assert_close(model.bound(num_updates=0), expected, rtol=1e-10, atol=0)


@pytest.mark.parametrize("learn", [True, False])
def test_adam_raises_the_bound_and_the_classifier_learns(learn):
    x, y = circles(151)
    model = classifier(x, y, 15, learn_inducing_locations=learn)
    start = model.bound().item()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(40):
        optimizer.zero_grad()
        (-model.bound()).backward()
        optimizer.step()
    assert model.bound().item() > start + 5
    test_x, test_y = circles(300, seed=1)
    probabilities = BernoulliLogitLikelihood()(model.predict(test_x)).probs
    assert ((probabilities > 0.5).double() == test_y).double().mean() > 0.85
    assert torch.equal(model.inducing_points, x[:15]) is not learn


def test_lbfgs_reaches_a_point_stationary_in_all_parameters_and_xi():
    x, y = circles()
    model = classifier(x, y, learn_inducing_locations=False)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=80, tolerance_grad=1e-6)

    def closure():
        optimizer.zero_grad()
        loss = -model.bound(num_updates=10)
        loss.backward()
        return loss

    optimizer.step(closure)
    model.update_xi(300, tol=1e-10)
    model.xi.requires_grad_()
    gradients = torch.autograd.grad(model.bound(num_updates=0), [*model.parameters(), model.xi])
    assert max(gradient.abs().max() for gradient in gradients) < 1e-3


def test_the_tighter_classifier_ends_above_the_standard_one():
    x, y = circles()
    values = [classifier(x, y, 4, bound=bound).update_xi().bound(0) for bound in BOUNDS]
    assert values[0] < values[1] - 0.1


def test_updates_stop_when_xi_rests():
    model = classifier(*circles())
    model.update_xi(1000, tol=1e-9)
    rested = model.xi.clone()
    model.update_xi(1, tol=0.0)
    torch.testing.assert_close(model.xi, rested, rtol=0, atol=2e-9)


def test_predictions_are_the_dense_ones():
    x, y = circles()
    model = classifier(x, y, jitter_val=0.0)
    model.mean_module.initialize(constant=-0.3)
    model.update_xi(3)
    new = torch.randn(7, 2, generator=torch.Generator().manual_seed(5))
    weight = torch.tanh(model.xi / 2) / (2 * model.xi)
    ls = torch.tensor([1.0, 1.2])
    K = lambda a, b: dense.rbf(a, b, 2.0, ls)
    inverse = torch.linalg.inv(K(x[:9], x[:9]))
    Kuf, Kus = K(x[:9], x), K(x[:9], new)
    S = torch.linalg.inv(inverse + inverse @ Kuf @ torch.diag(weight) @ Kuf.T @ inverse)
    mean = S @ inverse @ Kuf @ ((2 * y - 1) / 2 + 0.3 * weight)
    latent = model.predict(new)
    torch.testing.assert_close(latent.mean, -0.3 + Kus.T @ inverse @ mean)
    covariance = K(new, new) - Kus.T @ inverse @ Kus + Kus.T @ inverse @ S @ inverse @ Kus
    torch.testing.assert_close(latent.covariance_matrix, covariance)
    torch.testing.assert_close(latent.variance, covariance.diagonal())


def test_predict_has_no_graph_and_calling_the_model_has_one():
    x, y = circles()
    model, new = classifier(x, y), torch.randn(3, 2, requires_grad=True)
    assert not model.predict(new).mean.requires_grad
    (gradient,) = torch.autograd.grad(model(new).mean.sum(), new)
    assert gradient.abs().min() > 0


def test_many_test_points_are_predicted_without_their_full_covariance():
    x, y = circles()
    latent = classifier(x, y).predict(torch.randn(30_000, 2))
    assert latent.variance.shape == (30_000,)


def test_a_batch_of_labels_is_a_batch_of_classifiers():
    x, y = circles()
    labels = torch.stack([y, (x[:, 0] > 0).double(), (x[:, 1] > 1).double()])
    batch, kernel = torch.Size([3]), lambda **kw: gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel(**kw), **kw)
    shared = JaakkolaGPClassifier(x, labels, x[:9], kernel())
    own = JaakkolaGPClassifier(x, labels, x[:9], kernel(batch_shape=batch))
    single = [JaakkolaGPClassifier(x, row, x[:9], kernel()) for row in labels]
    expected = torch.stack([model.bound(4) for model in single])
    new = torch.randn(4, 2)
    for model in (shared, own):
        torch.testing.assert_close(model.bound(4), expected)
        latent = model.predict(new)
        torch.testing.assert_close(latent.mean, torch.stack([m.predict(new).mean for m in single]))
        torch.testing.assert_close(latent.variance, torch.stack([m.predict(new).variance for m in single]))


def test_labels_of_minus_one_and_zero_are_the_same():
    x, y = circles()
    assert torch.equal(classifier(x, y).bound(), classifier(x, 2 * y - 1).bound())
    assert torch.equal(classifier(x, y).bound(), classifier(x, y.bool()).bound())


def test_float32_stays_float32_and_finite():
    x, y = circles()
    model = classifier(x, y).float()
    double = classifier(x, y, jitter_val=model.jitter_val)
    value = model.bound(3)
    value.backward()
    assert value.dtype == model.predict(x.float()).mean.dtype == torch.float32
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())
    torch.testing.assert_close(value.double(), double.bound(3), rtol=1e-4, atol=0)


def test_the_state_has_xi_but_not_the_data_and_survives_copies():
    x, y = circles()
    model = classifier(x, y).update_xi(5)
    state = model.state_dict()
    assert "xi" in state
    assert not {"train_x", "labels"} & set(state)
    loaded = classifier(x, y)
    loaded.load_state_dict(state)
    for other in (loaded, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other.bound(0), model.bound(0), rtol=1e-12, atol=0)


def test_errors_say_what_came():
    x, y = circles()
    with pytest.raises(ValueError, match="Labels must be 0 and 1, or -1 and 1; got 0, 1, 2"):
        classifier(x, torch.arange(61.0) % 3)
    with pytest.raises(ValueError, match="Unknown bound 'tight'; choose 'tighter' or 'standard'"):
        classifier(x, y, bound="tight")
    with pytest.raises(ValueError, match=r"got shapes \(61, 2\), \(60,\) and \(9, 2\)"):
        classifier(x, y[:60])
    x[3, 1] = torch.nan
    with pytest.raises(ValueError, match="train_x holds NaN"):
        classifier(x, y)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.rand(3, 1), r"N x 2 like the inducing points; got \(3, 1\)"),
        (torch.full((3, 2), torch.nan), "NaN or infin"),
    ],
)
def test_test_inputs_that_cannot_be_are_refused(x, message):
    model = classifier(torch.rand(20, 2), (torch.rand(20) > 0.5).double())
    with pytest.raises(ValueError, match=message):
        model.predict(x)


@pytest.mark.filterwarnings("ignore:.*was not positive definite.*added jitter:RuntimeWarning")
@pytest.mark.parametrize("lengthscale", [0.3, 100.0])
def test_a_large_outputscale_in_float32_is_as_in_float64(lengthscale):
    x = torch.rand(50, 2).float()
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
    kernel.outputscale, kernel.base_kernel.lengthscale = 1e6, lengthscale
    model = JaakkolaGPClassifier(x, (x.sum(-1) > 1).float(), x[:15], kernel.float(), jitter_val=1e-4)
    found = []
    for dtype in (torch.float32, torch.float64):
        twin = copy.deepcopy(model).to(dtype).update_xi(20)
        q = twin.predict(x[:8].to(dtype) + 0.01)
        found.append([tensor.detach().double() for tensor in (twin.bound(), q.mean, q.variance)])
    for narrow, wide in zip(*found, strict=True):
        torch.testing.assert_close(narrow, wide, rtol=1e-3, atol=1e-4)
