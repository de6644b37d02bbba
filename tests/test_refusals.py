"""Calls that can only be a mistake, and what each is told: one table."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from gpytorch import likelihoods, variational
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.mlls import ExactMarginalLogLikelihood, VariationalELBO
from linear_operator.utils.errors import NanError
from torch.utils.data import DataLoader, TensorDataset

import tighter_gp
from tests.tools.factories import GP, CollapsedGP, make_gp, make_kernel, make_noise
from tests.tools.solve_gp import Joint
from tests.tools.support import Q_FORMS, double_problem
from tighter_gp import Blocks, PerPoint, TighterELBO, TighterInducingPointKernel, evaluate_bound, set_optimal_q
from tighter_gp.conditionals import BetaConditional, ScalarConditional

P = double_problem()
N, M = len(P.x), len(P.z)
ROWS, TASKS, ROW = torch.arange(8), torch.arange(N) % 3, np.arange(N) == 2
LABELS = torch.tensor([0, 1, 2, 0, 1, 0, 3, 3, 3, 2, 2, 1, 0, 0, 0, 2, 1])
NAN = torch.tensor(math.nan)
GAUSSIAN, LOGIT = likelihoods.GaussianLikelihood, tighter_gp.likelihoods.BernoulliLogitLikelihood
POISSON, MULTITASK = tighter_gp.likelihoods.PoissonLikelihood, likelihoods.MultitaskGaussianLikelihood
HADAMARD = likelihoods.HadamardGaussianLikelihood
BINARY, CLOSED_FORM = "takes labels 0 and 1, or -1 and 1", "needs a Gaussian likelihood; got"
NOT_OURS, MIXED = "needs a strategy of tighter_gp", "TighterInducingPointKernel"


def gp(**kwargs):
    return make_gp(P.z, make_kernel("rbf", P.variance, P.lengthscales), **{"jitter_val": 1e-6, **kwargs})


def elbo(model, y=P.y, x=P.x, likelihood=None, num_data=N, index=None, **kwargs):
    """The objective of one batch."""
    q = model(x, **({} if index is None else {"index": index}))
    return TighterELBO(likelihood or make_noise(0.1), model, num_data)(q, y, **kwargs)


def block_elbo(rows=slice(None), **kwargs):
    return elbo(gp(conditional=Blocks(LABELS)), P.y[rows], P.x[rows], **kwargs)


def standard(**kwargs):
    model = gp(**kwargs)
    return VariationalELBO(make_noise(0.1), model, N)(model(P.x), P.y)


def sgpr(noise=0.1, y=P.y, **kwargs):
    likelihood = noise if isinstance(noise, likelihoods.Likelihood) else make_noise(noise)
    return CollapsedGP(P.x, y, P.z, ScaleKernel(RBFKernel()), likelihood, **kwargs)


def evidence(model):
    return ExactMarginalLogLikelihood(model.likelihood, model)(model.train()(P.x), P.y)


def around(change):
    model = sgpr()
    model.covar_module = change(model.covar_module)
    return model


def product():
    return around(lambda kernel: kernel * RBFKernel())


def collapsed(x=P.x, y=P.y, likelihood=None, **kwargs):
    return tighter_gp.CollapsedGP(x, y, P.z, RBFKernel(), likelihood or make_noise(0.1), **kwargs)


def bound(**kwargs):
    given = {"inducing_points": P.z, "x": P.x, "y": P.y, "noise": P.noise, **kwargs}
    return tighter_gp.collapsed_bound(RBFKernel(), **given)


def twice():
    raw = torch.tensor(0.5, requires_grad=True)
    return torch.autograd.grad(bound(noise=raw.exp()), raw, create_graph=True)


def classes():
    return tighter_gp.models.MultiClassification(3, P.x, num_inducing=5)


def standard_of_tasks():
    likelihood = likelihoods.BernoulliLikelihood()
    model = tighter_gp.models.MultiOutputRegression(2, P.x, num_inducing=5, likelihood=likelihood)
    return evaluate_bound(model, likelihood, P.x, (P.x > 1).double(), objective=VariationalELBO)


def fit(model=None, likelihood=None, x=P.x, y=P.y, **kwargs):
    return tighter_gp.fit(model or gp(), likelihood or make_noise(0.1), x, y, **{"steps": 1, **kwargs})


def set_to(conditional, name, value):
    setattr(conditional, name, value)


def sampler(blocks):
    return tighter_gp.blocks.BlockBatchSampler(LABELS, blocks)


def solve_gp(*sizes, same=False):
    j, q = Joint(), [Q_FORMS["cholesky"](size) for size in sizes]
    return tighter_gp.SolveGPVariationalStrategy(None, j.z, j.o, q[0], q[0] if same else q[1])


def broken():
    model = gp()
    model.covar_module.base_kernel.raw_lengthscale.data.fill_(math.nan)
    return model(P.x)


def before_whitening():
    model, old = gp(), gp().state_dict()
    del old["variational_strategy.updated_strategy"]
    model.load_state_dict(old)
    return model


def fantasy(likelihood=None, form="cholesky", **kwargs):
    model = gp(distribution=Q_FORMS[form])
    if likelihood is not None:
        model.likelihood = likelihood
    return model.eval().get_fantasy_model(P.x[:3], P.y[:3], **kwargs)


def wrapped_stock():
    q = Q_FORMS["cholesky"](M, batch_shape=torch.Size([2]))
    wrap = variational.IndependentMultitaskVariationalStrategy
    return GP(lambda model: wrap(variational.VariationalStrategy(model, P.z, q), num_tasks=2))


def decoupled():
    """The outer q(f) is not of the tighter family."""
    inner = lambda model: tighter_gp.TighterVariationalStrategy(model, P.z, Q_FORMS["cholesky"](M))
    outer = variational.OrthogonallyDecoupledVariationalStrategy
    return GP(lambda model: outer(inner(model), P.x[:4], Q_FORMS["delta"](4)))


def loader(labels):
    return DataLoader(TensorDataset(P.x, labels), batch_size=8)


WRONG = (P.y > 0).long() + 1
CALLS = {
    # inputs
    "inputs with NaN": (lambda: gp()(P.x / 0), ValueError, "NaN or infinity in 17 of 17 rows; drop or impute"),
    "inputs of another dimension": (lambda: gp()(P.x[:, :1]), ValueError, r"N x 2 like the inducing points; got \(17"),
    "hyperparameters that are NaN": (broken, NanError, r"K_ZZ \(5x5, float64\) has .*jitter_val was 1e-06"),
    "an old checkpoint": (lambda: before_whitening()(P.x), NotImplementedError, "before GPyTorch whitened q"),
    # conditionals
    "unknown conditional": (lambda: gp(conditional="tight"), ValueError, "'tight'; choose 'optimal', 'beta', 'scalar'"),
    "conditional of another batch": (lambda: gp(conditional=BetaConditional((3,))), ValueError, "with batch_shape"),
    "negative beta": (lambda: set_to(BetaConditional(), "beta", -1.0), ValueError, "beta must be positive and finite"),
    "scale of one": (lambda: set_to(ScalarConditional(), "m", 1.0), ValueError, "strictly between 0 and 1; got"),
    "per point without index": (lambda: gp(conditional=PerPoint(N))(P.x), ValueError, r"call model\(x, index=rows\)"),
    "validation without index": (lambda: elbo(gp(conditional=PerPoint(N)).eval()), ValueError, r"index=rows\), also"),
    "index beyond data": (lambda: elbo(gp(conditional=PerPoint(N)), index=1 + torch.arange(N)), IndexError, "out of"),
    # blocks
    "labels that are no integers": (lambda: Blocks(torch.zeros(4)), ValueError, "one integer label per training point"),
    "a batch that cuts a block": (lambda: block_elbo(ROWS, index=ROWS), ValueError, "must hold whole blocks"),
    "a batch repeats a point": (lambda: block_elbo(ROWS[:3], index=ROWS[[6, 7, 7]]), ValueError, "each point once"),
    "a batch without index": (lambda: block_elbo(ROWS), ValueError, "Blocks knows 17 training points, the batch has 8"),
    "blocks of other noise": (lambda: block_elbo(likelihood=LOGIT()), TypeError, "noise only; got Bern.*'beta' or"),
    "blocks too small": (lambda: tighter_gp.blocks.partition(P.x, 5, max_size=3), ValueError, "max_size >= 4"),
    "no block per batch": (lambda: sampler(0), ValueError, "between 1 and the 4 blocks"),
    # the objective
    "no data": (lambda: TighterELBO(make_noise(1), gp(), 0), ValueError, "number of training points; got 0"),
    "no tempering": (lambda: TighterELBO(make_noise(1), gp(), N, beta=0.0), ValueError, "beta must be positive; got"),
    "num_data of a batch": (lambda: elbo(gp(), num_data=N - 1), ValueError, "17 points but num_data=16"),
    "a tensor for q": (lambda: TighterELBO(make_noise(1), gp(), N)(P.x, P.y), TypeError, r"call mll\(model\(x\), y\)"),
    "q of another model": (lambda: TighterELBO(make_noise(1), gp(), N)(gp()(P.x), P.y), ValueError, "another model"),
    "GPyTorch's strategy": (lambda: elbo(gp(strategy=variational.VariationalStrategy)), TypeError, NOT_OURS),
    "GPyTorch's strategy in a wrapper": (lambda: TighterELBO(MULTITASK(2), wrapped_stock(), N), TypeError, NOT_OURS),
    "a decoupled strategy": (lambda: TighterELBO(make_noise(1), decoupled(), N), TypeError, NOT_OURS),
    "no GP": (lambda: TighterELBO(make_noise(1), torch.nn.Linear(1, 1), N), AttributeError, "'variational_strategy'"),
    "standard bound of a beta": (lambda: standard(conditional="beta"), TypeError, r"only tighter_gp\.TighterELBO"),
    "standard bound of a scalar": (lambda: standard(conditional="scalar"), TypeError, "would overstate the bound"),
    "noise of another batch": (lambda: elbo(gp(), likelihood=make_noise(torch.ones(3))), ValueError, r"noise\[rows\]"),
    "no tasks": (lambda: elbo(gp(), likelihood=HADAMARD(2)), ValueError, "the task of each point.*tasks=.*got none"),
    # targets
    "a column of targets": (lambda: elbo(gp(), P.y[:, None]), ValueError, r"got \(17, 1\).*squeeze a trailing"),
    "few targets": (lambda: elbo(gp(), P.y[:5]), ValueError, r"shape \(17,\) to fit q\(f\); got \(5,\)"),
    "missing targets": (lambda: elbo(gp(), P.y.where(P.y > 0, NAN)), ValueError, r"17 targets .*nan_policy\('fill'\)"),
    "wrong labels in fit": (lambda: fit(likelihood=LOGIT(), y=WRONG), ValueError, BINARY),
    "wrong labels in a loader": (lambda: fit(likelihood=LOGIT(), x=loader(WRONG), y=None), ValueError, BINARY),
    "wrong labels in the objective": (lambda: elbo(gp(), WRONG, likelihood=LOGIT()), ValueError, BINARY),
    "wrong labels in a bound": (lambda: evaluate_bound(gp(), LOGIT(), P.x, WRONG), ValueError, BINARY),
    "one-hot rows": (lambda: fit(m := classes(), m.likelihood, y=torch.eye(3)[TASKS]), ValueError, r"got \(17, 3\)"),
    # arguments
    **{
        f"unknown argument of {call.__name__}": (
            lambda call=call: call(gp(), make_noise(0.1), P.x, P.y, noises=torch.ones(N)),
            TypeError,
            "argument 'noises'",
        )
        for call in (tighter_gp.fit, tighter_gp.evaluate_bound, tighter_gp.set_optimal_q, tighter_gp.diagnose)
    },
    "unknown argument of the objective": (lambda: elbo(gp(), noises=1), TypeError, "argument 'noises'.*noise= alone"),
    "noise of counts": (lambda: elbo(gp(), 0 * P.y, likelihood=POISSON(), noise=P.noise), TypeError, "none per point"),
    "training without gradients": (torch.no_grad()(fit), RuntimeError, r"outside of torch\.no_grad"),
    "half a step": (lambda: fit(steps=3.5), TypeError, "'float' object cannot be interpreted as an integer"),
    "a masked array": (lambda: fit(y=np.ma.array(P.y.numpy(), mask=ROW)), TypeError, r"masked.*filled\(numpy.nan\)"),
    # closed forms
    "best q of other noise": (lambda: set_optimal_q(gp(), LOGIT(), P.x, 0 * P.y), TypeError, f"{CLOSED_FORM} Bern"),
    "best q of other length": (lambda: set_optimal_q(gp(), make_noise(1), P.x, P.y[:9]), ValueError, r"got \((9|4),\)"),
    "chunks of nothing": (lambda: evaluate_bound(gp(), make_noise(1), P.x, P.y, 0), ValueError, "at least.*got 0"),
    "standard bound of tasks": (standard_of_tasks, ValueError, "must have one value per model.*need TighterELBO"),
    # collapsed models
    "SGPR, unknown bound": (lambda: sgpr(bound="tight"), ValueError, "'tight'; choose 'titsias', 'spherical'"),
    "SGPR of other noise": (lambda: TighterInducingPointKernel(RBFKernel(), P.z, LOGIT()), TypeError, CLOSED_FORM),
    "SGPR of several outputs": (lambda: sgpr(MULTITASK(2)), TypeError, "for a single output; use bound='titsias'"),
    "SGPR, negative jitter": (lambda: sgpr(jitter_val=-1e-6), ValueError, "jitter_val must not be negative; got"),
    "SGPR, missing blocks": (lambda: sgpr(bound="block"), ValueError, "belong together"),
    "SGPR scaled": (lambda: evidence(around(ScaleKernel)), TypeError, MIXED),
    "SGPR and another kernel": (lambda: evidence(around(lambda k: k + RBFKernel())), TypeError, MIXED),
    "bound of an SGPR in a product": (lambda: evaluate_bound(m := product(), m.likelihood, P.x, P.y), TypeError, MIXED),
    "prediction of a scaled SGPR": (lambda: tighter_gp.predict(around(ScaleKernel), P.x), TypeError, MIXED),
    "collapsed, unknown bound": (lambda: collapsed(bound="best"), ValueError, "Unknown bound 'best'"),
    "collapsed without Gaussian noise": (lambda: collapsed(likelihood=LOGIT()), TypeError, CLOSED_FORM),
    "collapsed, missing targets": (lambda: collapsed(y=P.y * NAN), ValueError, "y holds NaN"),
    "collapsed, few targets": (lambda: collapsed(y=P.y[:5]), ValueError, "x of shape N x D and y of shape N; got"),
    "collapsed, a column": (lambda: bound(y=P.y[:, None]), ValueError, r"got \(17, 2\) and \(17, 1\)"),
    "collapsed twice differentiated": (twice, RuntimeError, "differentiated twice"),
    # SOLVE-GP and fantasies
    "one q for both sets": (lambda: solve_gp(5, same=True), ValueError, "a variational distribution each"),
    "q of another size": (lambda: solve_gp(5, 5), ValueError, "over 5 and 3 variables"),
    "fantasy of a mean-field q": (lambda: fantasy(make_noise(1), "mean_field"), NotImplementedError, "CholeskyVariat"),
    "fantasy without likelihood": (fantasy, NotImplementedError, r"GaussianLikelihood as model\.likelihood; got none"),
    "fantasy of a Student-t": (lambda: fantasy(likelihoods.StudentTLikelihood()), NotImplementedError, "got StudentT"),
    "fantasy with noise": (lambda: fantasy(make_noise(1), noise=P.noise[:3]), TypeError, "takes no noise=: new"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_refused(name):
    call, error, message = CALLS[name]
    with pytest.raises(error, match=message):
        call()


def test_what_is_refused_leaves_q_as_it_was():
    model = gp()
    elbo(model)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    for call in (lambda: elbo(model, P.y[:5]), lambda: evaluate_bound(model, make_noise(0.1), P.x, P.y / 0)):
        with pytest.raises(ValueError, match=r"[Tt]argets"):
            call()
    assert model.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
