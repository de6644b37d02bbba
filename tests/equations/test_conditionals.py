"""Who chooses the scales: start values, formulas, setters, priors, sparse gradients, errors."""

from __future__ import annotations

import copy
import pickle

import gpytorch
import pytest
import torch

from tighter_gp import PerPoint
from tighter_gp.maths import bounds
from tighter_gp.conditionals import (
    BetaConditional,
    Conditional,
    OptimalConditional,
    ScalarConditional,
    make_conditional,
)

N = 7
ROWS = torch.tensor([4, 0, 9])
LEARNED = {
    "beta": lambda shape=(): BetaConditional(torch.Size(shape)),
    "scalar": lambda shape=(): ScalarConditional(torch.Size(shape)),
    "per point": lambda shape=(): PerPoint(11, torch.Size(shape)),
}


def price(scale: torch.Tensor) -> torch.Tensor:
    return 0.5 * (scale - 1 - torch.log(scale))


@pytest.fixture
def residual() -> torch.Tensor:
    return 2 * torch.rand(N)


# ---------------------------------------------------------------------------------------------------------------------
# "optimal"
# ---------------------------------------------------------------------------------------------------------------------


def test_optimal_has_no_parameter_and_leaves_the_scales_to_the_objective(residual):
    conditional = OptimalConditional()
    assert list(conditional.parameters()) == []
    assert conditional.state_dict() == {}
    assert not conditional.is_learned
    assert torch.equal(conditional.scale(residual), torch.ones(N))
    assert torch.equal(conditional.penalty(residual), torch.zeros(N))


# ---------------------------------------------------------------------------------------------------------------------
# Start values and formulas
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_start_values_and_shapes(shape):
    for values, start, tail in (
        (BetaConditional(torch.Size(shape)).beta, 1.0, ()),
        (ScalarConditional(torch.Size(shape)).m, 0.9, ()),
        (PerPoint(11, torch.Size(shape)).m, 0.9, (11,)),
    ):
        torch.testing.assert_close(values, torch.full((*shape, *tail), start), rtol=1e-14, atol=0)


def test_beta_scales_are_beta_over_beta_plus_residual(residual):
    conditional = BetaConditional()
    conditional.beta = 0.3
    scale = 0.3 / (0.3 + residual)
    torch.testing.assert_close(conditional.scale(residual), scale, rtol=1e-12, atol=0)
    torch.testing.assert_close(conditional.penalty(residual), price(scale), rtol=1e-10, atol=1e-14)


def test_scalar_gives_every_point_the_same_scale(residual):
    conditional = ScalarConditional()
    conditional.m = 0.3
    torch.testing.assert_close(conditional.scale(residual), torch.full((N,), 0.3), rtol=1e-12, atol=0)
    torch.testing.assert_close(conditional.penalty(residual), price(torch.full((N,), 0.3)), rtol=1e-10, atol=0)


def test_per_point_looks_its_scales_up():
    conditional, values = PerPoint(11), 0.05 + 0.9 * torch.rand(11)
    conditional.m = values
    torch.testing.assert_close(conditional.m, values, rtol=1e-12, atol=0)
    torch.testing.assert_close(conditional.scale(torch.rand(3), index=ROWS), values[ROWS], rtol=1e-12, atol=0)
    torch.testing.assert_close(conditional.penalty(torch.rand(3), index=ROWS), price(values[ROWS]), rtol=1e-9, atol=0)


def test_huge_beta_is_plain_svgp(residual):
    conditional = BetaConditional()
    conditional.beta = 1e12
    torch.testing.assert_close(conditional.scale(residual), torch.ones(N), rtol=0, atol=1e-11)
    torch.testing.assert_close(conditional.penalty(residual), torch.zeros(N), rtol=0, atol=1e-12)
    assert (conditional.penalty(residual) >= 0).all()


@pytest.mark.parametrize("beta", [1e-12, 1e-3, 1e6])
def test_beta_is_kept_over_many_orders_of_magnitude(beta):
    conditional = BetaConditional()
    conditional.beta = beta
    assert conditional.beta.item() == pytest.approx(beta, rel=1e-9, abs=0)
    residual = torch.tensor([0.0, 1e-9, 1.0])
    penalty = conditional.penalty(residual)
    assert torch.isfinite(penalty).all()
    assert penalty[0] == 0
    assert conditional.scale(residual)[0] == 1


@pytest.mark.parametrize("name", ["beta", "scalar"])
@pytest.mark.parametrize("shape", [(3,), (2, 3)])
def test_a_batch_has_one_value_each(name, shape):
    conditional, values = LEARNED[name](shape), 0.05 + 0.9 * torch.rand(shape)
    attribute = "beta" if name == "beta" else "m"
    setattr(conditional, attribute, values)
    residual = torch.rand(*shape, N)
    scale, penalty = conditional.scale(residual).expand_as(residual), conditional.penalty(residual).expand_as(residual)
    flat = zip(values.flatten(), residual.reshape(-1, N), scale.reshape(-1, N), penalty.reshape(-1, N), strict=True)
    for value, d, m, p in flat:
        expected = value / (value + d) if name == "beta" else value.expand(N)
        torch.testing.assert_close(m, expected, rtol=1e-12, atol=0)
        torch.testing.assert_close(p, price(expected), rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("shape", [(3,), (2, 3)])
def test_a_batch_of_tables_has_one_row_of_scales_each(shape):
    conditional, values = PerPoint(11, torch.Size(shape)), 0.05 + 0.9 * torch.rand(*shape, 11)
    conditional.m = values
    torch.testing.assert_close(conditional.m, values, rtol=1e-12, atol=0)
    residual = torch.rand(*shape, 3)
    torch.testing.assert_close(conditional.scale(residual, index=ROWS), values[..., ROWS], rtol=1e-12, atol=0)
    torch.testing.assert_close(conditional.penalty(residual, index=ROWS), price(values[..., ROWS]), rtol=1e-9, atol=0)


# ---------------------------------------------------------------------------------------------------------------------
# Gradients
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["beta", "scalar"])
def test_gradient_reaches_the_raw_parameter_and_the_residual(name, residual):
    conditional = LEARNED[name]()
    raw = next(conditional.parameters())
    residual.requires_grad_()
    weights = torch.randn(2, N)

    def functional(d):
        return (weights * torch.stack([conditional.scale(d), conditional.penalty(d)])).sum()

    gradients = torch.autograd.grad(functional(residual), (raw, residual), materialize_grads=True)
    for leaf, gradient in zip((raw, residual), gradients, strict=True):
        for n, entry in enumerate(gradient.reshape(-1)):
            step = torch.zeros_like(leaf).reshape(-1)
            step[n] = 1e-6
            with torch.no_grad():
                values = []
                for sign in (1, -1):
                    leaf.add_(sign * step.view_as(leaf))
                    values.append(functional(residual).item())
                    leaf.sub_(sign * step.view_as(leaf))
            assert entry.item() == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-6, abs=1e-8)


def test_gradient_in_log_beta_is_the_closed_form(residual):
    r"""Eq. (9) for a misfit that grows with the variance at rate lambda / 2."""
    conditional, rate = BetaConditional(), 2.5
    conditional.beta = 0.3
    beta = conditional.beta
    bound = -(0.5 * rate * conditional.scale(residual) * residual + conditional.penalty(residual)).sum()
    (gradient,) = torch.autograd.grad(bound, conditional.raw_beta, retain_graph=True)
    (slope,) = torch.autograd.grad(beta, conditional.raw_beta)
    m = 0.3 / (0.3 + residual)
    expected = 0.5 * ((1 - m) * ((1 - m) - rate * m * residual)).sum()
    torch.testing.assert_close(0.3 * gradient / slope, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("shape", [(), (2, 3)])
def test_gradient_of_the_table_is_sparse_and_right(shape):
    conditional = PerPoint(11, torch.Size(shape))
    conditional.m = 0.05 + 0.9 * torch.rand(*shape, 11)
    rows = torch.tensor([4, 0, 9, 4])  # a point may come twice
    weights = torch.randn(2, *shape, 4)

    def functional(m):
        return (weights * torch.stack([m, price(m)])).sum()

    residual = torch.rand(*shape, 4)
    values = torch.stack([conditional.scale(residual, index=rows), conditional.penalty(residual, index=rows)])
    (weights * values).sum().backward()
    gradient = conditional.raw_m.grad
    assert gradient.is_sparse
    assert set(gradient.coalesce().indices()[0].tolist()) == {0, 4, 9}
    (expected,) = torch.autograd.grad(functional(conditional.m[..., rows]), conditional.raw_m)
    torch.testing.assert_close(gradient.to_dense(), expected, rtol=1e-9, atol=1e-12)


def test_sparse_adam_changes_only_the_rows_of_the_batch():
    conditional = PerPoint(11)
    before = conditional.m.detach().clone()
    optimizer = torch.optim.SparseAdam(conditional.parameters(), lr=0.1)
    conditional.penalty(torch.rand(3), index=ROWS).sum().backward()
    optimizer.step()
    changed = (conditional.m != before).nonzero().flatten().tolist()
    assert changed == [0, 4, 9]
    assert (conditional.m[ROWS] > before[ROWS]).all(), "the penalty falls towards one"


# ---------------------------------------------------------------------------------------------------------------------
# Setters
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [-1.0, 0.0, float("nan"), float("inf"), torch.tensor([0.5, -0.1, 2.0])])
def test_bad_beta_raises_and_changes_nothing(value):
    conditional = BetaConditional(torch.Size([3]))
    conditional.beta = torch.tensor([0.2, 0.3, 0.4])
    before = conditional.beta.detach().clone()
    with pytest.raises(ValueError, match=r"beta must be positive and finite; got .* A very large beta gives SVGP"):
        conditional.beta = value
    assert torch.equal(conditional.beta, before)


@pytest.mark.parametrize("make", [lambda: ScalarConditional(), lambda: PerPoint(3)])
@pytest.mark.parametrize("value", [-0.1, 0.0, 1.0, 1.5, float("nan")])
def test_bad_scale_raises_and_changes_nothing(make, value):
    conditional = make()
    before = conditional.m.detach().clone()
    with pytest.raises(ValueError, match="Scales must lie strictly between 0 and 1; got"):
        conditional.m = value
    assert torch.equal(conditional.m, before)


@pytest.mark.parametrize("make", [lambda: ScalarConditional(), lambda: PerPoint(3)])
@pytest.mark.parametrize(("raw", "expected"), [(-1e3, 0.0), (0.0, 0.5), (1e3, 1.0)])
def test_a_learned_scale_never_leaves_the_unit_interval(make, raw, expected):
    conditional = make()
    conditional.raw_m.data.fill_(raw)
    torch.testing.assert_close(conditional.m, torch.full_like(conditional.m, expected))


@pytest.mark.parametrize("name", LEARNED)
def test_one_number_sets_the_whole_batch(name):
    conditional = LEARNED[name]((2, 3))
    attribute = "beta" if name == "beta" else "m"
    setattr(conditional, attribute, 0.25)
    values = getattr(conditional, attribute)
    torch.testing.assert_close(values, torch.full_like(values, 0.25), rtol=1e-12, atol=0)


def test_one_row_of_scales_sets_every_table():
    conditional, row = PerPoint(4, torch.Size([2, 3])), torch.tensor([0.1, 0.2, 0.3, 0.4])
    conditional.m = row
    torch.testing.assert_close(conditional.m, row.expand(2, 3, 4), rtol=1e-12, atol=0)


# GPyTorch's initialize reshapes a value with the right number of entries, which would permute a batch silently.
@pytest.mark.parametrize(
    ("name", "shape", "wrong"), [("beta", (), (3,)), ("beta", (2, 3), (3, 2)), ("scalar", (3,), (2,))]
)
def test_value_of_another_shape_raises_and_names_both(name, shape, wrong):
    conditional = LEARNED[name](shape)
    with pytest.raises(ValueError, match="got a value of shape"):
        setattr(conditional, "beta" if name == "beta" else "m", torch.full(wrong, 0.5))


def test_table_of_another_length_raises_and_names_both():
    with pytest.raises(ValueError, match="got a value of shape"):
        PerPoint(4).m = torch.full((3,), 0.5)


@pytest.mark.parametrize(("name", "attribute"), [("beta", "beta"), ("scalar", "m"), ("per point", "m")])
def test_initialize_sets_by_name(name, attribute):
    conditional = LEARNED[name]().initialize(**{attribute: 0.35})
    values = getattr(conditional, attribute)
    torch.testing.assert_close(values, torch.full_like(values, 0.35), rtol=1e-12, atol=0)


def test_setting_changes_the_parameter_in_place():
    for name in LEARNED:
        conditional = LEARNED[name]()
        (raw,) = conditional.parameters()
        setattr(conditional, "beta" if name == "beta" else "m", 0.35)
        assert next(conditional.parameters()) is raw


# ---------------------------------------------------------------------------------------------------------------------
# Constraints and priors
# ---------------------------------------------------------------------------------------------------------------------


def test_constraint_bounds_beta():
    conditional = BetaConditional(beta_constraint=gpytorch.constraints.Interval(0.5, 3.0))
    assert conditional.beta.item() == pytest.approx(1.0, rel=1e-12)
    conditional.raw_beta.data.fill_(50.0)
    assert 2.99 < conditional.beta.item() <= 3.0
    with pytest.raises(RuntimeError, match="out of bounds"):
        conditional.beta = 4.0


def test_constraint_with_an_initial_value_says_where_beta_starts():
    conditional = BetaConditional(beta_constraint=gpytorch.constraints.GreaterThan(1e-3, initial_value=5.0))
    assert conditional.beta.item() == pytest.approx(5.0)


def test_constraint_that_excludes_one_starts_inside_it():
    conditional = BetaConditional(beta_constraint=gpytorch.constraints.Interval(1e-4, 0.5))
    assert 1e-4 < conditional.beta.item() < 0.5


PRIORS = {
    "beta_prior": lambda shape=(): BetaConditional(torch.Size(shape), beta_prior=gpytorch.priors.GammaPrior(2.0, 3.0)),
    "scale_prior": lambda shape=(): ScalarConditional(
        torch.Size(shape), scale_prior=gpytorch.priors.UniformPrior(0.0, 1.0)
    ),
}


@pytest.mark.parametrize("name", PRIORS)
def test_prior_is_found_and_evaluated_at_the_value(name):
    conditional = PRIORS[name]((3,))
    values = torch.tensor([0.2, 0.3, 0.4])
    attribute = "beta" if name == "beta_prior" else "m"
    setattr(conditional, attribute, values)
    model = gpytorch.Module()
    model.conditional = conditional
    ((found, module, prior, closure, _),) = model.named_priors()
    assert found == f"conditional.{name}"
    torch.testing.assert_close(closure(module), values, rtol=1e-12, atol=0)
    if name == "beta_prior":
        expected = torch.distributions.Gamma(torch.tensor(2.0), torch.tensor(3.0)).log_prob(values)
        torch.testing.assert_close(prior.log_prob(closure(module)), expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", PRIORS)
def test_value_can_be_drawn_from_the_prior(name):
    conditional = PRIORS[name]()
    attribute = "beta" if name == "beta_prior" else "m"
    before = getattr(conditional, attribute).item()
    conditional.sample_from_prior(name)
    assert getattr(conditional, attribute).item() != before


def test_no_prior_by_default():
    for make in LEARNED.values():
        assert list(make().named_priors()) == []


# ---------------------------------------------------------------------------------------------------------------------
# Copies
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LEARNED)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
def test_copies_keep_the_values_and_go_their_own_way(name, duplicate):
    conditional, attribute = LEARNED[name]((3,)), "beta" if name == "beta" else "m"
    setattr(conditional, attribute, 0.35)
    copied = duplicate(conditional)
    assert torch.equal(getattr(copied, attribute), getattr(conditional, attribute))
    setattr(copied, attribute, 0.6)
    assert getattr(conditional, attribute).flatten()[0].item() == pytest.approx(0.35)


@pytest.mark.parametrize("name", PRIORS)
def test_deepcopy_of_a_prior_belongs_to_the_copy(name):
    conditional = PRIORS[name]()
    attribute = "beta" if name == "beta_prior" else "m"
    copied = copy.deepcopy(conditional)
    setattr(copied, attribute, 0.35)
    ((_, module, _, closure, _),) = copied.named_priors()
    assert closure(module).item() == pytest.approx(0.35)


@pytest.mark.parametrize("name", PRIORS)
def test_conditional_with_a_prior_can_be_pickled(name):
    conditional = PRIORS[name]()
    copied = pickle.loads(pickle.dumps(conditional))
    assert [found for found, *_ in copied.named_priors()] == [name]


@pytest.mark.parametrize("name", LEARNED)
def test_state_dict_brings_the_values_back(name):
    conditional, other = LEARNED[name]((3,)), LEARNED[name]((3,))
    attribute = "beta" if name == "beta" else "m"
    setattr(conditional, attribute, 0.35)
    other.load_state_dict(conditional.state_dict())
    assert torch.equal(getattr(other, attribute), getattr(conditional, attribute))


# ---------------------------------------------------------------------------------------------------------------------
# index
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["scale", "penalty"])
class TestIndexOfPerPoint:
    """Both methods look scales up, so both must check."""

    def test_missing(self, method):
        with pytest.raises(ValueError, match=r"needs to know which training points.*call model\(x, index=rows\)"):
            getattr(PerPoint(11), method)(torch.rand(3))

    @pytest.mark.parametrize(
        ("index", "came"),
        [
            (torch.zeros(3, dtype=torch.float64), r"float64 of shape \(3,\)"),
            (torch.tensor([True, False, True]), r"bool of shape \(3,\)"),
            (torch.tensor([0, 1]), r"int64 of shape \(2,\)"),
            (torch.tensor([[0, 1, 2]]), r"int64 of shape \(1, 3\)"),
            (torch.tensor(1), r"int64 of shape \(\)"),
        ],
    )
    def test_wrong_dtype_or_shape(self, method, index, came):
        with pytest.raises(ValueError, match=rf"one integer index per row of x, shape \(3,\); got {came}"):
            getattr(PerPoint(11), method)(torch.rand(3), index=index)

    @pytest.mark.parametrize(("index", "came"), [([0, 11, 3], "0 to 11"), ([-1, 2, 3], "-1 to 3")])
    def test_out_of_range(self, method, index, came):
        with pytest.raises(
            IndexError, match=rf"must lie in 0\.\.10 for PerPoint\(num_data=11\); got values from {came}"
        ):
            getattr(PerPoint(11), method)(torch.rand(3), index=torch.tensor(index))

    def test_int32(self, method):
        conditional = PerPoint(11)
        conditional.m = 0.05 + 0.9 * torch.rand(11)
        actual, expected = (getattr(conditional, method)(torch.rand(3), index=i) for i in (ROWS.int(), ROWS))
        assert torch.equal(actual, expected)


def test_per_point_needs_a_training_point():
    with pytest.raises(ValueError, match="at least one training point; got num_data=0"):
        PerPoint(0)


@pytest.mark.parametrize("name", ["beta", "scalar"])
def test_the_other_conditionals_do_not_care_about_an_index(name, residual):
    conditional = LEARNED[name]()
    index = torch.arange(N)
    assert torch.equal(conditional.scale(residual, index=index), conditional.scale(residual))
    assert torch.equal(conditional.penalty(residual, index=index), conditional.penalty(residual))


# ---------------------------------------------------------------------------------------------------------------------
# make_conditional
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind", "is_learned", "is_strict"),
    [
        ("optimal", OptimalConditional, False, False),
        ("beta", BetaConditional, True, False),
        ("scalar", ScalarConditional, True, True),
    ],
)
def test_names_make_conditionals(name, kind, is_learned, is_strict):
    conditional = make_conditional(name, torch.Size([3]), torch.zeros((), dtype=torch.float32))
    assert type(conditional) is kind
    assert (conditional.is_learned, conditional.is_strict) == (is_learned, is_strict)
    for parameter in conditional.parameters():
        assert parameter.shape == (3,)
        assert parameter.dtype == torch.float32


def test_per_point_is_learned_and_not_strict_for_every_likelihood():
    assert PerPoint(3).is_learned
    assert not PerPoint(3).is_strict


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3), (1, 3)])
def test_object_whose_batch_broadcasts_is_passed_through(shape):
    conditional = BetaConditional(torch.Size(shape))
    assert make_conditional(conditional, torch.Size([2, 3]), torch.zeros(())) is conditional


@pytest.mark.parametrize("shape", [(4,), (2,), (1, 2, 3)])
def test_object_whose_batch_does_not_fit_raises(shape):
    message = r"PerPoint has batch_shape .*does not fit .*\(2, 3\); build it with batch_shape=\(2, 3\)"
    with pytest.raises(ValueError, match=message):
        make_conditional(PerPoint(5, torch.Size(shape)), torch.Size([2, 3]), torch.zeros(()))


def test_unknown_name_raises_and_lists_the_names():
    with pytest.raises(ValueError, match=r"Unknown conditional 'betta'; choose 'optimal', 'beta', 'scalar'.*or pass"):
        make_conditional("betta", torch.Size(), torch.zeros(()))


@pytest.mark.parametrize("value", [None, 0.5, BetaConditional])
def test_something_else_raises(value):
    with pytest.raises(TypeError, match="conditional must be a name or a Conditional; got"):
        make_conditional(value, torch.Size(), torch.zeros(()))


def test_a_conditional_of_your_own_is_taken(residual):
    class Half(Conditional):
        def scale(self, residual, *, index=None):
            return torch.full_like(residual, 0.5)

        def penalty(self, residual, *, index=None):
            return bounds.scale_penalty(self.scale(residual))

    conditional = make_conditional(Half(), torch.Size([3]), torch.zeros(()))
    assert conditional.is_learned
    torch.testing.assert_close(conditional.penalty(residual), price(torch.full((N,), 0.5)), rtol=1e-12, atol=0)


def test_half_a_conditional_cannot_be_made():
    class Incomplete(Conditional):
        def scale(self, residual, *, index=None):
            return residual

    with pytest.raises(TypeError, match=r"abstract method.*penalty"):
        Incomplete()


def test_a_beta_remembers_where_it_started():
    constraint = gpytorch.constraints.GreaterThan(2.0, initial_value=3.0)
    conditional = BetaConditional(beta_constraint=constraint)
    start = conditional.raw_beta.item()
    assert start != 0.0
    conditional.beta = 5.0
    assert conditional.first_raw_beta == start != conditional.raw_beta.item()
