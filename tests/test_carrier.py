"""The covariance that carries (s, d, m) through whatever GPyTorch's wrappers build around it."""

from __future__ import annotations

import copy
import pickle

import gpytorch
import pytest
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from linear_operator import to_linear_operator
from linear_operator.operators import (
    BlockDiagLinearOperator,
    BlockInterleavedLinearOperator,
    DiagLinearOperator,
    KroneckerProductLinearOperator,
    RootLinearOperator,
)

from tighter_gp.carrier import (
    Carrier,
    HadamardLinearOperator,
    ImplicitLinearOperator,
    VarianceLinearOperator,
    iter_carriers,
    replace_variance,
)

N = 7
CARRIED = ("explained", "residual")


def carrier(*batch: int, requires_grad: bool = False, seed: int = 0) -> Carrier:
    """A dense covariance whose diagonal is s + m d."""
    generator = torch.Generator().manual_seed(seed)
    explained, residual, scale = 0.1 + torch.rand(3, *batch, N, generator=generator)
    explained = explained + 1
    root = 0.3 * torch.randn(*batch, N, 3, generator=generator)
    covar = root @ root.mT
    variance = explained + scale * residual
    covar = covar + torch.diag_embed(variance - covar.diagonal(dim1=-1, dim2=-2))
    if requires_grad:
        for tensor in (explained, residual):
            tensor.requires_grad_()
    return Carrier(explained + scale * residual, lambda: covar, explained, residual, strategy="the strategy")


def diagonal(operator) -> torch.Tensor:
    return operator.diagonal(dim1=-1, dim2=-2)


def dense_diagonal(operator) -> torch.Tensor:
    return operator.to_dense().diagonal(dim1=-1, dim2=-2)


def only(operator) -> Carrier:
    (found,) = iter_carriers(operator)
    return found


# ---------------------------------------------------------------------------------------------------------------------
# As a covariance
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_diagonal_is_explained_plus_scaled_residual(batch):
    operator = carrier(*batch)
    assert operator.shape == (*batch, N, N)
    expected = operator.variance
    torch.testing.assert_close(diagonal(operator), expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(dense_diagonal(operator), expected, rtol=1e-13, atol=0)


def test_gradient_of_the_diagonal_reaches_the_parts():
    operator, weights = carrier(3, requires_grad=True), torch.randn(3, N)
    gradient, other = torch.autograd.grad((weights * diagonal(operator)).sum(), [operator.explained, operator.residual])
    torch.testing.assert_close(gradient, weights, rtol=1e-13, atol=0)
    scale = (operator.variance - operator.explained) / operator.residual
    torch.testing.assert_close(other, weights * scale, rtol=1e-10, atol=0)


def test_variance_of_a_distribution_is_the_diagonal():
    operator = carrier(3)
    distribution = MultivariateNormal(torch.zeros(3, N), operator)
    torch.testing.assert_close(distribution.variance, diagonal(operator), rtol=1e-13, atol=0)


@pytest.mark.parametrize("batch", [(), (3,)])
def test_algebra_is_that_of_the_covariance(batch):
    operator, rhs = carrier(*batch), torch.randn(N, 4)
    matrix = operator.dense()
    assert torch.equal(operator.to_dense(), matrix)
    assert torch.equal(operator.mT.to_dense(), matrix.mT)
    torch.testing.assert_close(operator @ rhs, matrix @ rhs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(operator.cholesky().to_dense(), torch.linalg.cholesky(matrix), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(operator.logdet(), torch.linalg.slogdet(matrix).logabsdet, rtol=1e-10, atol=0)


def test_samples_have_the_covariance():
    operator = carrier()
    samples = MultivariateNormal(torch.zeros(N), operator).rsample(torch.Size([200_000]))
    torch.testing.assert_close(samples.T @ samples / 200_000, operator.to_dense(), rtol=0, atol=0.03)


def test_gradient_of_a_product_reaches_the_covariance():
    matrix = carrier().to_dense().requires_grad_()
    other = carrier()
    operator = Carrier(other.variance, lambda: matrix, other.explained, other.residual, strategy=None)
    rhs, weights = torch.randn(N, 4), torch.randn(N, 4)
    (gradient,) = torch.autograd.grad((weights * (operator @ rhs)).sum(), matrix)
    torch.testing.assert_close(gradient, weights @ rhs.T, rtol=1e-12, atol=1e-12)


def test_adding_noise_gives_the_marginal():
    operator, likelihood = carrier(), gpytorch.likelihoods.GaussianLikelihood()
    marginal = likelihood(MultivariateNormal(torch.zeros(N), operator))
    expected = operator.to_dense() + likelihood.noise * torch.eye(N)
    torch.testing.assert_close(marginal.covariance_matrix, expected, rtol=1e-12, atol=0)


# ---------------------------------------------------------------------------------------------------------------------
# What is carried, and what is not
# ---------------------------------------------------------------------------------------------------------------------

RESHAPES = {
    "expand": (lambda op: op.expand(4, 2, 3, N, N), lambda t: t.expand(4, 2, 3, N)),
    "permute": (lambda op: op.permute(1, 0, 2, 3), lambda t: t.permute(1, 0, 2)),
    "transpose of the batch": (lambda op: op.transpose(0, 1), lambda t: t.transpose(0, 1)),
    "transpose": (lambda op: op.mT, lambda t: t),
    "unsqueeze in front": (lambda op: op.unsqueeze(0), lambda t: t.unsqueeze(0)),
    "unsqueeze in the middle": (lambda op: op.unsqueeze(1), lambda t: t.unsqueeze(1)),
    "unsqueeze from behind": (lambda op: op.unsqueeze(-3), lambda t: t.unsqueeze(-2)),
    "detach": (lambda op: op.detach(), lambda t: t.detach()),
    "clone": (lambda op: op.clone(), lambda t: t),
    "float": (lambda op: op.float(), lambda t: t.float()),
    "deepcopy": (copy.deepcopy, lambda t: t),
    "pickle": (lambda op: pickle.loads(pickle.dumps(op)), lambda t: t),
}


@pytest.mark.parametrize("name", RESHAPES)
def test_reshaping_keeps_the_carried_tensors_and_the_strategy(name):
    reshape, expected = RESHAPES[name]
    operator = carrier(2, 3)
    result = reshape(operator)
    assert isinstance(result, Carrier)
    assert result.strategy == "the strategy"
    for field in CARRIED:
        assert torch.equal(getattr(result, field), expected(getattr(operator, field))), field
    assert result.shape[:-1] == result.residual.shape
    rtol = 1e-5 if name == "float" else 1e-12
    torch.testing.assert_close(diagonal(result), dense_diagonal(result), rtol=rtol, atol=0)


@pytest.mark.parametrize("name", RESHAPES)
def test_reshaping_an_operator_that_carries_nothing_is_that_of_its_matrix(name):
    matrix = carrier(2, 3).to_dense()
    matrix = matrix + 0.1 * torch.arange(N).double()  # nor need it be symmetric
    operator = ImplicitLinearOperator(matrix.diagonal(dim1=-1, dim2=-2), lambda: matrix)
    result, expected = (RESHAPES[name][0](one) for one in (operator, to_linear_operator(matrix)))
    assert isinstance(result, ImplicitLinearOperator)
    assert torch.equal(result.to_dense(), expected.to_dense())
    assert torch.equal(diagonal(result), dense_diagonal(result))


@pytest.mark.parametrize("name", ["detach", "deepcopy", "pickle"])
def test_copies_of_an_operator_in_a_graph_have_none(name):
    operator = carrier(2, 3, requires_grad=True)
    operator.explained, operator.residual = 1 * operator.explained, 1 * operator.residual  # as a model makes them
    matrix = operator.to_dense().requires_grad_()
    for made in (operator, ImplicitLinearOperator(operator.variance, lambda: 1 * matrix)):
        copied = RESHAPES[name][0](made)
        for tensor in (
            copied.variance,
            copied.to_dense(),
            *(getattr(copied, field, matrix.detach()) for field in CARRIED),
        ):
            assert not tensor.requires_grad
        torch.testing.assert_close(copied.to_dense(), matrix.detach(), rtol=0, atol=0)


def test_an_operator_in_a_graph_leaves_it_in_place():
    matrix = carrier(2).to_dense().requires_grad_()
    operator = ImplicitLinearOperator(matrix.diagonal(dim1=-1, dim2=-2), lambda: 1 * matrix)
    assert operator.detach_() is operator
    assert not operator.to_dense().requires_grad
    assert not operator.requires_grad
    operator.requires_grad_(True)
    assert operator.to_dense().requires_grad


def test_distributions_that_expand_or_unsqueeze_keep_it():
    distribution = MultivariateNormal(torch.zeros(3, N), carrier(3))
    for changed in (distribution.expand(torch.Size([2, 3])), distribution.unsqueeze(0)):
        assert only(changed.lazy_covariance_matrix).residual.shape == changed.mean.shape


@pytest.mark.parametrize("index", [(..., slice(3), slice(3)), (1,), (..., [0, 2], [0, 2])])
def test_a_selection_is_a_plain_covariance(index):
    """Some of the points are not the batch that was asked for: the objective must not take them for it."""
    operator = carrier(3)
    selected = to_linear_operator(operator[index])
    assert list(iter_carriers(selected)) == []
    torch.testing.assert_close(selected.to_dense(), operator.to_dense()[index], rtol=1e-12, atol=0)


# ---------------------------------------------------------------------------------------------------------------------
# Trees of operators
# ---------------------------------------------------------------------------------------------------------------------


def coefficients(*batch: int) -> torch.Tensor:
    return torch.randn(*batch, 4, 1, generator=torch.Generator().manual_seed(5))


TREES = {
    "plain": lambda op: op,
    "constant times": lambda op: 2.5 * op,
    "block interleaved": lambda op: BlockInterleavedLinearOperator(op, block_dim=-3),
    "block diagonal": lambda op: BlockDiagLinearOperator(op, block_dim=-3),
    "sum over the batch": lambda op: op.sum(-3),
    "Kronecker sum of an LMC": lambda op: (
        KroneckerProductLinearOperator(op, RootLinearOperator(coefficients(*op.batch_shape))).sum(-3).add_jitter(1e-3)
    ),
    "independent tasks": lambda op: (
        MultitaskMultivariateNormal.from_batch_mvn(
            MultivariateNormal(torch.zeros(op.shape[:-1]), op), task_dim=-1
        ).lazy_covariance_matrix
    ),
    "task dimension in front": lambda op: (
        MultitaskMultivariateNormal.from_batch_mvn(
            MultivariateNormal(torch.zeros(op.shape[:-1]), op), task_dim=0
        ).lazy_covariance_matrix
    ),
    "one function for all tasks": lambda op: (
        MultitaskMultivariateNormal.from_repeated_mvn(
            MultivariateNormal(torch.zeros(op.shape[:-1]), op), num_tasks=4
        ).lazy_covariance_matrix
    ),
}


@pytest.mark.parametrize("batch", [(3,), (2, 3)])
@pytest.mark.parametrize("name", TREES)
def test_the_carrier_is_found_in_the_tree(name, batch):
    found = only(TREES[name](carrier(*batch)))
    assert found.strategy == "the strategy"
    assert found.residual.shape == found.shape[:-1]


@pytest.mark.parametrize("batch", [(3,), (2, 3)])
@pytest.mark.parametrize("name", TREES)
def test_replacing_the_carrier_by_its_own_diagonal_changes_no_variance(name, batch):
    tree = TREES[name](carrier(*batch))
    replaced = replace_variance(tree, diagonal(only(tree)))
    assert list(iter_carriers(replaced)) == []
    assert replaced.shape == tree.shape
    torch.testing.assert_close(diagonal(replaced), dense_diagonal(tree), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("batch", [(3,), (2, 3)])
@pytest.mark.parametrize("name", TREES)
def test_replacing_the_carrier_puts_other_variances_into_the_same_tree(name, batch):
    tree = TREES[name](carrier(*batch))
    found = only(tree)
    variances = 0.1 + torch.rand(found.residual.shape)
    # The same tree around a plain dense covariance with these variances.
    plain = Carrier(variances, lambda: torch.diag_embed(variances), variances, torch.zeros_like(variances), None)
    if name == "one function for all tasks":  # the wrapper has expanded it already
        plain = BlockInterleavedLinearOperator(plain, block_dim=-3)
    elif name == "task dimension in front":  # and moved the tasks to the end of the batch
        plain = TREES["block interleaved"](plain)
    else:
        plain = TREES[name](plain)
    torch.testing.assert_close(
        diagonal(replace_variance(tree, variances)), dense_diagonal(plain), rtol=1e-11, atol=1e-12
    )


def test_variances_of_an_lmc_are_the_sums_over_its_latent_functions():
    operator, W = carrier(3), coefficients(3).squeeze(-1)
    tree = TREES["Kronecker sum of an LMC"](operator)
    variances = 0.1 + torch.rand(3, N)
    expected = (variances.T @ W.square() + 1e-3).reshape(-1)  # N x tasks, tasks fastest
    torch.testing.assert_close(diagonal(replace_variance(tree, variances)), expected, rtol=1e-12, atol=0)


def test_variances_of_independent_tasks_are_interleaved():
    tree, variances = TREES["independent tasks"](carrier(3)), 0.1 + torch.rand(3, N)
    torch.testing.assert_close(diagonal(replace_variance(tree, variances)), variances.T.reshape(-1), rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", TREES)
def test_gradient_of_the_replaced_variances_is_that_of_the_tree(name):
    """The objective finds lambda by differentiating the variances in the tree: it must reach every latent function."""
    tree = TREES[name](carrier(3))
    probe = torch.zeros_like(only(tree).residual).requires_grad_()
    variances = diagonal(replace_variance(tree, probe))
    weights = torch.rand(variances.shape)
    (gradient,) = torch.autograd.grad((weights * variances).sum(), probe)
    step = torch.rand(probe.shape)
    moved = diagonal(replace_variance(tree, step)) - diagonal(replace_variance(tree, torch.zeros_like(step)))
    torch.testing.assert_close((gradient * step).sum(), (weights * moved).sum(), rtol=1e-10, atol=0)
    assert (gradient > 0).all()


def test_carrier_with_jitter_can_be_replaced():
    tree, variances = carrier(3).add_jitter(1e-3), 0.1 + torch.rand(3, N)
    assert only(tree).residual.shape == (3, N)
    torch.testing.assert_close(diagonal(replace_variance(tree, variances)), variances + 1e-3, rtol=1e-12, atol=0)


def test_replacing_leaves_the_tree_as_it_was():
    operator = carrier(3)
    tree = TREES["block interleaved"](operator)
    before = tree.to_dense()
    replace_variance(tree, torch.zeros(3, N))
    assert only(tree) is operator
    assert torch.equal(tree.to_dense(), before)


def test_two_carriers_are_both_found():
    tree = carrier(seed=1) + carrier(seed=2)
    assert len(list(iter_carriers(tree))) == 2


def test_a_tree_without_a_carrier_has_none():
    assert list(iter_carriers(DiagLinearOperator(torch.ones(N)).add_jitter(0.1))) == []


def test_elementwise_product_with_a_mask_keeps_the_carrier():
    """How GPyTorch selects one task per row."""
    operator = carrier(3)
    mask = torch.nn.functional.one_hot(torch.arange(N) % 3, 3).T.to(torch.get_default_dtype())
    tree = (operator * RootLinearOperator(mask.unsqueeze(-1))).sum(-3)
    torch.testing.assert_close(diagonal(tree), (mask * diagonal(operator)).sum(0), rtol=1e-9, atol=0)
    assert only(tree).residual.shape == (3, N)
    variances = 0.1 + torch.rand(3, N)
    torch.testing.assert_close(
        diagonal(replace_variance(tree, variances)), (mask * variances).sum(0), rtol=1e-9, atol=0
    )


def test_elementwise_product_is_the_product_of_the_entries_in_every_shape():
    operator, other = carrier(2, 3), RootLinearOperator(torch.randn(2, 3, N, 2))
    product, expected = operator * other, operator.to_dense() * other.to_dense()
    rhs = torch.randn(N, 4)
    torch.testing.assert_close(product @ rhs, expected @ rhs, rtol=1e-11, atol=1e-11)
    for actual, matrix in (
        (product, expected),
        (product.mT, expected.mT),
        (product.expand(4, 2, 3, N, N), expected.expand(4, 2, 3, N, N)),
        (product.permute(1, 0, 2, 3), expected.permute(1, 0, 2, 3)),
        (product.unsqueeze(0), expected.unsqueeze(0)),
    ):
        torch.testing.assert_close(actual.to_dense(), matrix, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(diagonal(actual), matrix.diagonal(dim1=-1, dim2=-2), rtol=1e-12, atol=1e-12)
        assert only(actual).residual.shape == actual.shape[:-1]


# ---------------------------------------------------------------------------------------------------------------------
# The two operators that stand in for others
# ---------------------------------------------------------------------------------------------------------------------


def hadamard():
    torch.manual_seed(0)
    left, right = (factor @ factor.mT for factor in torch.randn(2, 2, N, N))
    return HadamardLinearOperator(to_linear_operator(left), to_linear_operator(right)), left * right


def variances():
    torch.manual_seed(0)
    values = torch.rand(2, N)
    return VarianceLinearOperator(values), torch.diag_embed(values)


@pytest.mark.parametrize("make", [hadamard, variances])
def test_operators_of_ours_are_their_dense_matrices(make):
    operator, matrix = make()
    rhs, rows = torch.randn(2, N, 3), torch.tensor([4, 0, 4])
    torch.testing.assert_close(operator.to_dense(), matrix)
    torch.testing.assert_close(operator @ rhs, matrix @ rhs)
    torch.testing.assert_close(operator.mT.to_dense(), matrix.mT)
    torch.testing.assert_close(diagonal(operator), matrix.diagonal(dim1=-1, dim2=-2))
    torch.testing.assert_close(operator[1, rows, rows], matrix[1, rows, rows])
    torch.testing.assert_close(operator.expand(3, 2, N, N).to_dense(), matrix.expand(3, 2, N, N))
    torch.testing.assert_close(operator.unsqueeze(0).to_dense(), matrix.unsqueeze(0))
    torch.testing.assert_close(operator.unsqueeze(0).permute(1, 0, 2, 3).to_dense(), matrix.unsqueeze(1))
    torch.testing.assert_close((operator * to_linear_operator(matrix)).to_dense(), matrix * matrix)
