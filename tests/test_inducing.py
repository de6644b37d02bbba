from __future__ import annotations

import gpytorch
import pytest
import torch

from tests.tools import dense
from tests.tools.factories import make_kernel
from tests.tools.support import LargestOutput
from tighter_gp import inducing

METHODS = ["kmeans", "greedy", "random"]


def inputs(n: int = 211, dim: int = 3, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, dim, generator=torch.Generator().manual_seed(seed))


def kernel(dim: int = 3, variance: float = 1.3) -> gpytorch.kernels.Kernel:
    return make_kernel("matern32", variance, torch.linspace(0.5, 1.1, dim))


def squared_distances(x, points):
    return (x.unsqueeze(1) - points.unsqueeze(0)).square().sum(-1)


def rows(points) -> set[tuple[float, ...]]:
    return {tuple(point) for point in points.tolist()}


# -- all methods --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_points_are_distinct_finite_and_of_the_dtype_of_x(method, dtype):
    x = inputs().to(dtype)
    points = inducing.allocate(x, 19, method, kernel=kernel().to(dtype))
    assert points.shape == (19, 3)
    assert points.dtype == dtype
    assert len(rows(points)) == 19
    assert torch.isfinite(points).all()


@pytest.mark.parametrize("method", METHODS)
def test_same_seed_same_points_and_the_global_generator_is_left_alone(method):
    x, before = inputs(), torch.get_rng_state()
    first, again, other = (inducing.allocate(x, 19, method, kernel=kernel(), seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("method", METHODS)
def test_chunks_do_not_change_the_points(method):
    x = inputs()
    whole, parts = (inducing.allocate(x, 19, method, kernel=kernel(), chunk_size=size) for size in (1000, 13))
    torch.testing.assert_close(whole, parts, rtol=1e-10, atol=1e-10)


@pytest.mark.filterwarnings("ignore:.*explain all of x.*:UserWarning")
@pytest.mark.parametrize("method", METHODS)
def test_all_distinct_rows_are_found_among_duplicates(method):
    distinct = inputs(7)
    points = inducing.allocate(distinct.repeat(9, 1), 7, method, kernel=kernel())
    torch.testing.assert_close(points.sort(0).values, distinct.sort(0).values, rtol=0, atol=1e-14)
    assert squared_distances(points, distinct).min(0).values.max() < 1e-26


@pytest.mark.parametrize("method", METHODS)
def test_too_few_distinct_rows_raise(method):
    x = inputs(7).repeat(9, 1)
    with pytest.raises(ValueError, match="x has 7 distinct rows, too few for 8 inducing points; ask for at most 7"):
        inducing.allocate(x, 8, method, kernel=kernel())


@pytest.mark.parametrize("method", METHODS)
def test_bad_inputs_raise(method):
    allocate = lambda x, m: inducing.allocate(x, m, method, kernel=kernel())
    with pytest.raises(ValueError, match="between 1 and the 211 rows of x; got 212"):
        allocate(inputs(), 212)
    with pytest.raises(ValueError, match="between 1 and the 211 rows of x; got 0"):
        allocate(inputs(), 0)
    with pytest.raises(ValueError, match=r"N x D or N; got float64 of shape \(1, 211, 3\)"):
        allocate(inputs().unsqueeze(0), 5)
    with pytest.raises(ValueError, match="got int64 of shape"):
        allocate(torch.ones(9, 2, dtype=torch.long), 5)
    x = inputs()
    x[[3, 8], 1] = torch.nan
    with pytest.raises(ValueError, match="NaN or infinity in 2 of 211 rows"):
        allocate(x, 5)


@pytest.mark.parametrize("method", METHODS)
def test_no_array_grows_beyond_the_data_and_one_chunk(method):
    n, m, dim, chunk = 6_007, 13, 5, 256
    x, covar = inputs(n, dim).float(), kernel(dim).float()
    with LargestOutput() as seen:
        inducing.allocate(x, m, method, kernel=covar, chunk_size=chunk)
    assert seen.largest <= (n * m if method == "greedy" else n * dim)


def test_the_points_have_no_graph():
    x = inputs().requires_grad_()
    for method in METHODS:
        assert not inducing.allocate(x, 5, method, kernel=kernel()).requires_grad


# -- k-means ------------------------------------------------------------------------------------------------------------


def test_kmeans_centres_are_the_means_of_their_cells():
    x = inputs() + 50.0
    points = inducing.kmeans(x, 6, max_iter=200, tol=0.0)
    cells = squared_distances(x, points).argmin(1)
    assert torch.equal(inducing.nearest(x, points, chunk_size=10), cells)
    means = torch.stack([x[cells == j].mean(0) for j in range(6)])
    torch.testing.assert_close(points, means, rtol=1e-12, atol=1e-12)


def test_kmeans_is_as_good_as_scikit_learn():
    cluster = pytest.importorskip("sklearn.cluster")
    x = inputs(1501, 4)
    ours = min(squared_distances(x, inducing.kmeans(x, 20, seed=s)).min(1).values.sum().item() for s in range(3))
    theirs = cluster.KMeans(20, n_init=3, random_state=0).fit(x.numpy()).inertia_
    assert ours < 1.02 * theirs


def test_kmeans_finds_separate_clusters():
    centres = 40 * inputs(9)
    x = (centres.unsqueeze(1) + 0.1 * inputs(9 * 17).view(9, 17, 3)).flatten(0, 1)
    points = inducing.kmeans(x, 9)
    assert squared_distances(centres, points).min(1).values.max() < 0.1


def test_float32_data_far_from_the_origin_are_clustered_as_at_the_origin():
    x = (inputs(801) * 8).round() / 8  # exact in float32 after the shift
    cells = [inducing.nearest(y, inducing.kmeans(y, 8)) for y in (x.float(), x.float() + 1000)]
    assert (cells[0] == cells[1]).float().mean() > 0.99


def test_no_iterations_return_the_seeds_which_are_rows_of_x():
    x = inputs()
    assert rows(inducing.kmeans(x, 19, max_iter=0)) <= rows(x)


def test_seeds_spread_more_than_random_rows():
    x = inputs(401, 2)
    cost = lambda points: squared_distances(x, points).min(1).values.sum()
    seeded = sum(cost(inducing.kmeans(x, 12, seed=s, max_iter=0)) for s in range(20))
    drawn = sum(cost(inducing.random_subset(x, 12, seed=s)) for s in range(20))
    assert seeded < 0.9 * drawn


# -- greedy conditional variance ----------------------------------------------------------------------------------------


def test_greedy_takes_the_largest_conditional_variance_each_time():
    x, covar = inputs(61), kernel()
    points = inducing.greedy_variance(x, 13, covar)
    K = dense.matern32(x, x, 1.3, torch.linspace(0.5, 1.1, 3))
    index = [int((x == point).all(1).nonzero()) for point in points]
    for j in range(1, 13):
        before = index[:j]
        D = K - K[:, before] @ torch.linalg.inv(K[before][:, before]) @ K[before]
        assert D.diagonal().argmax() == index[j]


def test_greedy_starts_at_the_largest_prior_variance():
    x, covar = inputs(61), gpytorch.kernels.LinearKernel()
    points = inducing.greedy_variance(x, 2, covar)
    assert torch.equal(points[0], x[x.square().sum(1).argmax()])


@pytest.mark.parametrize("seed", range(6))
def test_the_next_greedy_point_never_lowers_the_tighter_bound(seed):
    p = dense.problem(seed, n=23, kernel="matern32", hetero=False)
    order = inducing.greedy_variance(p.x, 9, make_kernel("matern32", p.variance, p.lengthscales), seed=seed)
    values = []
    for m in range(1, 10):
        z = order[:m]
        Kuu, Kuf = (dense.matern32(z, x, p.variance, p.lengthscales) for x in (z, p.x))
        Q = Kuf.T @ torch.linalg.inv(Kuu) @ Kuf
        values.append(dense.f4(p._replace(Q=Q, D=p.Kff - Q)))
    assert (torch.stack(values).diff() > -1e-9).all()


def test_greedy_points_leave_less_variance_than_random_ones_do_on_average():
    p = dense.problem(1, n=41)
    K = lambda a, b: dense.rbf(a, b, p.variance, p.lengthscales)
    trace = lambda z: (p.Kff - K(p.x, z) @ torch.linalg.inv(K(z, z)) @ K(z, p.x)).trace()
    greedy = inducing.greedy_variance(p.x, 7, make_kernel("rbf", p.variance, p.lengthscales))
    drawn = torch.stack([trace(inducing.random_subset(p.x, 7, seed=s)) for s in range(20)])
    assert trace(greedy) < 0.8 * drawn.mean()


def test_greedy_that_explains_all_warns_and_still_returns_distinct_rows():
    x = torch.linspace(0, 1, 83).unsqueeze(-1).float()
    smooth = gpytorch.kernels.RBFKernel().float()
    smooth.lengthscale = 2.0
    with pytest.warns(UserWarning, match=r"^\d inducing points explain all of x up to rounding in float32; the other"):
        points = inducing.greedy_variance(x, 40, smooth)
    assert torch.equal(points[:4], inducing.greedy_variance(x, 4, smooth))
    assert len(rows(points)) == 40
    assert rows(points) <= rows(x)


def test_greedy_with_a_batch_of_kernels_raises():
    batched = gpytorch.kernels.RBFKernel(batch_shape=torch.Size([2]))
    with pytest.raises(ValueError, match=r"one kernel; got one of batch shape \(2,\)"):
        inducing.greedy_variance(inputs(), 5, batched)


# -- random, median, split ----------------------------------------------------------------------------------------------


def test_random_rows_are_drawn_evenly():
    x = torch.arange(10.0).unsqueeze(-1)
    drawn = torch.cat([inducing.random_subset(x, 3, seed=s) for s in range(600)]).flatten().long()
    count = torch.bincount(drawn, minlength=10)
    assert (count - 180).abs().max() < 60  # five standard deviations


def test_median_lengthscale_is_the_median_distance():
    x = inputs(41)
    distances = squared_distances(x, x).sqrt()[tuple(torch.triu_indices(41, 41, 1))]
    torch.testing.assert_close(inducing.median_lengthscale(x), distances.median())


def test_median_lengthscale_of_a_subset_is_close_and_seeded():
    x = inputs(2003)
    exact = squared_distances(x, x).sqrt()[tuple(torch.triu_indices(2003, 2003, 1))].median()
    with LargestOutput() as seen:
        value = inducing.median_lengthscale(x, max_points=200)
    assert seen.largest < 200 * 200
    assert value.shape == ()
    torch.testing.assert_close(value, exact, rtol=0.1, atol=0)
    assert value == inducing.median_lengthscale(x, max_points=200)
    assert value != inducing.median_lengthscale(x, max_points=200, seed=1)


def test_median_lengthscale_ignores_equal_rows():
    x = torch.cat([torch.zeros(30, 2), torch.tensor([[3.0, 4.0]])])
    assert inducing.median_lengthscale(x) == 5.0
    with pytest.raises(ValueError, match="All 30 inputs looked at are equal"):
        inducing.median_lengthscale(x[:30])


def test_split_gives_every_point_once():
    points = inputs(7)
    u, v = inducing.split_inducing_points(points)
    assert (len(u), len(v)) == (4, 3)
    assert torch.equal(torch.cat([u, v]), points)
    with pytest.raises(ValueError, match=r"at least two points.*got shape \(1, 3\)"):
        inducing.split_inducing_points(points[:1])


# -- allocate -----------------------------------------------------------------------------------------------------------


def test_our_greedy_points_are_those_of_botorch_from_the_same_start():
    allocators = pytest.importorskip("botorch.models.utils.inducing_point_allocators")
    x, covar = inputs(61), gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel()) + gpytorch.kernels.LinearKernel()
    theirs = inducing.allocate(x, 9, allocators.GreedyVarianceReduction(), kernel=covar)
    assert torch.equal(inducing.greedy_variance(x, 9, covar), theirs)


def test_a_botorch_allocator_that_needs_a_model_is_accepted():
    allocators = pytest.importorskip("botorch.models.utils.inducing_point_allocators")
    from botorch.models import SingleTaskGP

    x = torch.rand(31, 3, generator=torch.Generator().manual_seed(0))
    previous = SingleTaskGP(x, x.sum(-1, keepdim=True).sin())
    points = inducing.allocate(x, 5, allocators.GreedyImprovementReduction(previous, maximize=True), kernel=kernel())
    assert rows(points) <= rows(x)


def test_allocate_says_what_it_needs():
    with pytest.raises(ValueError, match="Placement by 'greedy' depends on the kernel: pass kernel="):
        inducing.allocate(inputs(), 5, "greedy")
    with pytest.raises(ValueError, match="Unknown method 'grid'; choose 'kmeans', 'greedy', 'random' or pass"):
        inducing.allocate(inputs(), 5, "grid")


def test_an_empty_cell_is_seeded_again():
    x = inputs()
    start = torch.cat([x[:3], torch.full((4, 3), 1e3)])  # four centres that no point is nearest to
    points = inducing._lloyd(x, start, 50, 100, 0.0)
    assert torch.bincount(inducing.nearest(x, points), minlength=7).min() > 0
