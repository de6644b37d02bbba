"""The fused moments have the values and gradients of plain autograd."""

from __future__ import annotations

import pytest
import torch
from tighter_gp.maths.moments import Whitened, svgp_moments

from tighter_gp.maths.fused import fused_gaussian_terms, fused_kl, fused_moments


def _fused(*arguments):
    return fused_moments(*arguments)


def inputs(num_inducing, num_data, kernel_batch=(), q_batch=(), kind="root"):
    root = torch.randn(*kernel_batch, num_inducing, num_inducing + 2)
    inducing = (root @ root.mT / num_inducing + 0.1 * torch.eye(num_inducing)).requires_grad_()
    cross = torch.randn(*kernel_batch, num_inducing, num_data, requires_grad=True)
    variance = (50 + torch.rand(*kernel_batch, num_data)).requires_grad_()
    mean = torch.randn(*q_batch, num_inducing, requires_grad=True)
    spread = {
        "root": {"root": torch.randn(*q_batch, num_inducing, num_inducing).tril().requires_grad_()},
        "stddev": {"stddev": torch.rand(*q_batch, num_inducing, requires_grad=True)},
        "point": {},
    }[kind]
    return inducing, cross, variance, Whitened(mean, **spread)


def compare(inducing, cross, variance, q):
    plain = svgp_moments(torch.linalg.cholesky(inducing), cross, variance, q)
    fused = _fused(inducing, torch.linalg.cholesky(inducing.detach()), cross, variance, q)
    tensors = [tensor for tensor in (inducing, cross, variance, *q) if tensor is not None]
    weights = [torch.randn_like(part) for part in torch.broadcast_tensors(*plain)]

    def gradients(moments):
        total = sum((weight * part).sum() for weight, part in zip(weights, moments, strict=True))
        return torch.autograd.grad(total, tensors, allow_unused=True)

    for mine, theirs in zip(fused, plain, strict=True):
        torch.testing.assert_close(mine.expand_as(theirs), theirs.expand(mine.shape), rtol=1e-10, atol=1e-10)
    for mine, theirs in zip(gradients(fused), gradients(plain), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("kind", ["root", "stddev", "point"])
@pytest.mark.parametrize("num_data", [3, 17], ids=["few points", "many points"])
@pytest.mark.parametrize(
    ("kernel_batch", "q_batch"), [((), ()), ((), (4,)), ((4,), (4,)), ((3, 1), (3, 4)), ((4,), ())], ids=str
)
def test_fused_moments_equal_plain_autograd(kind, num_data, kernel_batch, q_batch):
    compare(*inputs(5, num_data, kernel_batch, q_batch, kind))


def test_the_gradient_stops_where_the_residual_is_clamped():
    inducing, cross, variance, q = inputs(5, 9)
    variance.data[:4] = 0.0
    compare(inducing, cross, variance, q)
    assert (_fused(inducing, torch.linalg.cholesky(inducing.detach()), cross, variance, q).residual[:4] == 0).all()


@pytest.mark.parametrize("num_data", [3, 17], ids=["few points", "many points"])
def test_parts_are_a_block_diagonal_q(num_data):
    inducing, cross, variance, whole = inputs(7, num_data)
    first = Whitened(whole.mean[:4], root=whole.root[:4, :4])
    second = Whitened(whole.mean[4:], root=whole.root[4:, 4:])
    chol = torch.linalg.cholesky(inducing.detach())
    joint = Whitened(whole.mean, root=torch.block_diag(first.root, second.root))
    in_parts, at_once = (
        _fused(inducing, chol, cross, variance, first, second),
        _fused(inducing, chol, cross, variance, joint),
    )
    tensors = [inducing, cross, variance, whole.mean, whole.root]
    for mine, other in zip(in_parts, at_once, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)
        weights = torch.randn_like(mine)
        for a, b in zip(
            torch.autograd.grad(
                (weights * mine).sum(), tensors, allow_unused=True, retain_graph=True, materialize_grads=True
            ),
            torch.autograd.grad(
                (weights * other).sum(), tensors, allow_unused=True, retain_graph=True, materialize_grads=True
            ),
            strict=True,
        ):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_second_derivatives_are_refused():
    inducing, cross, variance, q = inputs(4, 6)
    moments = _fused(inducing, torch.linalg.cholesky(inducing.detach()), cross, variance, q)
    with pytest.raises(RuntimeError, match="cannot be differentiated twice"):
        torch.autograd.grad(moments.explained.sum(), cross, create_graph=True)


@pytest.mark.parametrize("num_data", [40, 400], ids=["few points", "many points"])
def test_a_backward_pass_makes_at_most_five_products_of_order_m2b_and_no_square_array(num_data):
    from torch.utils._python_dispatch import TorchDispatchMode

    num_inducing = 30

    class Recorder(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.products, self.largest = 0, 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            sizes = [t.numel() for t in args if isinstance(t, torch.Tensor)]
            if isinstance(result, torch.Tensor):
                self.largest = max(self.largest, result.numel())
                if function.__name__.startswith(("mm", "bmm", "addmm", "linalg_solve_triangular")):
                    self.products += (
                        max(sizes) >= num_inducing * num_data and min([*sizes, result.numel()]) >= num_inducing**2
                    )
            return result

    moments = _fused(
        *(lambda i, c, v, q: (i, torch.linalg.cholesky(i.detach()), c, v, q))(*inputs(num_inducing, num_data))
    )
    total = sum(part.sum() for part in moments)
    with Recorder() as recorder:
        total.backward()
    assert 1 <= recorder.products <= 5
    assert recorder.largest < num_data**2 or num_data < num_inducing * 2


@pytest.mark.parametrize("kind", ["root", "stddev"])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_fused_kl_is_the_dense_one_with_its_gradients(kind, batch):
    mean = torch.randn(*batch, 4, requires_grad=True)
    if kind == "root":
        spread = (torch.randn(*batch, 4, 4).tril() + 2 * torch.eye(4)).requires_grad_()
        covariance = spread @ spread.mT
    else:
        spread = (0.5 + torch.rand(*batch, 4)).requires_grad_()
        covariance = torch.diag_embed(spread.square())
    actual = fused_kl(Whitened(mean, **{kind: spread}))
    trace = covariance.diagonal(dim1=-1, dim2=-2).sum(-1)
    expected = 0.5 * (trace + mean.square().sum(-1) - 4 - torch.linalg.slogdet(covariance).logabsdet)
    torch.testing.assert_close(actual, expected)
    weights = torch.randn(batch)
    found = [torch.autograd.grad((weights * value).sum(), (mean, spread)) for value in (actual, expected)]
    torch.testing.assert_close(found[0][0], found[1][0])
    lower = torch.tril if kind == "root" else torch.clone
    torch.testing.assert_close(lower(found[0][1]), lower(found[1][1]))


def test_a_standard_deviation_of_zero_has_no_gradient():
    root = torch.tensor([[0.0, 0.0], [1.0, 2.0]], requires_grad=True)
    fused_kl(Whitened(torch.zeros(2), root=root)).backward()
    torch.testing.assert_close(root.grad, torch.tensor([[0.0, 0.0], [1.0, 1.5]]))


@pytest.mark.parametrize("beta", [1.0, 0.3])
@pytest.mark.parametrize("noise_shape", [(), (1,), (6,), (2, 1), (2, 6)])
def test_fused_gaussian_terms_are_those_of_the_equations_with_their_gradients(beta, noise_shape):
    y, mean = torch.randn(2, 6), torch.randn(2, 6, requires_grad=True)
    explained, residual = torch.rand(2, 6, requires_grad=True), torch.rand(2, 6, requires_grad=True)
    noise = (0.2 + torch.rand(noise_shape)).requires_grad_()
    actual = fused_gaussian_terms(y, mean, explained, residual, noise, beta)
    scale = 1 / (1 + residual / (beta * noise))
    density = torch.distributions.Normal(mean, noise.sqrt()).log_prob(y)
    log_prob = (density - 0.5 * (explained + scale * residual) / noise).sum(-1)
    price = 0.5 * (scale - 1 - scale.log()).sum(-1)
    torch.testing.assert_close(actual, (log_prob, price))
    weights = torch.randn(2, 2)

    def gradients(terms):
        total = sum((weight * term).sum() for weight, term in zip(weights, terms, strict=True))
        return torch.autograd.grad(total, (mean, explained, residual, noise))

    torch.testing.assert_close(gradients(actual), gradients((log_prob, price)))
