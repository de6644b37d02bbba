"""GPyTorch's own suite for variational strategies, run on ours as it ships: in float32, from its seed."""

from __future__ import annotations

import functools
import unittest

import pytest
import torch
from gpytorch.likelihoods import MultitaskGaussianLikelihood
from gpytorch.mlls import VariationalELBO
from gpytorch.test.variational_test_case import VariationalTestCase
from gpytorch.variational import IndependentMultitaskVariationalStrategy, LMCVariationalStrategy

from tests.tools.support import Q_FORMS
from tighter_gp import SolveGPVariationalStrategy, TighterELBO, TighterVariationalStrategy


def solve_gp(model, points, distribution, learn_inducing_locations=True):
    """Nine of the sixteen points for u, seven for v."""
    q = (type(distribution)(size, batch_shape=distribution.batch_shape) for size in (9, 7))
    return SolveGPVariationalStrategy(model, points[..., :9, :], points[..., 9:, :], *q, learn_inducing_locations)


def wrapped(wrapper, *args, **kwargs):
    return wrapper(TighterVariationalStrategy(*args, **kwargs), num_tasks=2)


def lmc(*args, **kwargs):
    return wrapped(functools.partial(LMCVariationalStrategy, num_latents=3), *args, **kwargs)


class Conformance(VariationalTestCase):
    """The suite, and one factorisation of K_ZZ in each of its two calls; a natural q(u) GPyTorch factorises too."""

    form, objective, strategy, batch_shape = "cholesky", TighterELBO, TighterVariationalStrategy, torch.Size()

    def setUp(self):
        super().setUp()
        torch.set_default_dtype(torch.float32)

    @property
    def distribution_cls(self):
        return Q_FORMS[self.form]

    @property
    def mll_cls(self):
        return self.objective

    @property
    def strategy_cls(self):
        return self.strategy

    def check_counts(self, cg, cholesky, ciq):
        assert not cg.called
        assert not ciq.called
        if self.form == "natural":
            assert cholesky.call_count <= 10
        else:
            assert cholesky.call_count == 2

    def test_training_iteration(self, *args, **kwargs):
        self.check_counts(*super().test_training_iteration(*args, **kwargs))

    def test_eval_iteration(self, *args, **kwargs):
        self.check_counts(*super().test_eval_iteration(*args, **kwargs))

    def test_fantasy_call(self, *args, **kwargs):
        if self.form == "cholesky" and not hasattr(self, "likelihood"):
            return super().test_fantasy_call(*args, **kwargs)
        with pytest.raises(NotImplementedError):
            super().test_fantasy_call(*args, **kwargs)


class Multitask(Conformance):
    """Two tasks around our strategy: the batch of latent functions is consumed."""

    likelihood = MultitaskGaussianLikelihood
    event_shape = torch.Size([32, 2])

    @property
    def likelihood_cls(self):
        return functools.partial(self.likelihood, num_tasks=2)

    def test_training_iteration(self, *args, expected_batch_shape=None, **kwargs):
        shape = (self.batch_shape if expected_batch_shape is None else expected_batch_shape)[:-1]
        VariationalTestCase.test_training_iteration(self, *args, expected_batch_shape=shape, **kwargs)

    def test_eval_iteration(self, *args, expected_batch_shape=None, **kwargs):
        shape = (self.batch_shape if expected_batch_shape is None else expected_batch_shape)[:-1]
        VariationalTestCase.test_eval_iteration(self, *args, expected_batch_shape=shape, **kwargs)


def suite(name, base=Conformance, **attributes):
    globals()[f"Test{name}"] = type(f"Test{name}", (base, unittest.TestCase), {"__module__": __name__, **attributes})


for _form in Q_FORMS:
    suite(f"Tighter_{_form}", form=_form)
    suite(f"Standard_{_form}", form=_form, objective=VariationalELBO)
    suite(f"SolveGP_{_form}", form=_form, strategy=staticmethod(solve_gp))
for _name in ("beta", "scalar"):
    suite(f"_{_name}", strategy=staticmethod(functools.partial(TighterVariationalStrategy, conditional=_name)))
_independent = functools.partial(wrapped, IndependentMultitaskVariationalStrategy)
suite("Independent", Multitask, strategy=staticmethod(_independent), batch_shape=torch.Size([2]))
suite("LMC", Multitask, strategy=staticmethod(lmc), batch_shape=torch.Size([3]))
del _form, _name
