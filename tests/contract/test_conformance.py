"""GPyTorch's own conformance suite for variational strategies, run on ours as it ships: in float32, from its seed."""

from __future__ import annotations

import functools
import unittest

import pytest
import torch
from gpytorch.mlls import VariationalELBO
from gpytorch.test.variational_test_case import VariationalTestCase
from gpytorch.variational import VariationalStrategy

import tighter_gp
from tests.tools.support import Q_FORMS

# Calls of torch.linalg.cholesky_ex in two training steps and in two evaluations.
NUM_CHOLESKY = {
    "cholesky": (2, 1),
    "mean_field": (2, 1),
    "delta": (2, 1),
    "natural": (4, 3),
    "tril_natural": (2, 1),
}


class Conformance(VariationalTestCase):
    """The suite with GPyTorch's counts of factorisations on top."""

    form: str
    objective: type
    strategy: object = tighter_gp.TighterVariationalStrategy

    def setUp(self):
        super().setUp()
        torch.set_default_dtype(torch.float32)

    @property
    def batch_shape(self):
        return torch.Size()

    @property
    def distribution_cls(self):
        return Q_FORMS[self.form]

    @property
    def mll_cls(self):
        return self.objective

    @property
    def strategy_cls(self):
        return self.strategy

    def test_training_iteration(self, *args, **kwargs):
        cg, cholesky, ciq = super().test_training_iteration(*args, **kwargs)
        assert not cg.called
        assert not ciq.called
        assert cholesky.call_count == NUM_CHOLESKY[self.form][0]

    def test_eval_iteration(self, *args, **kwargs):
        cg, cholesky, ciq = super().test_eval_iteration(*args, **kwargs)
        assert not cg.called
        assert not ciq.called
        assert cholesky.call_count == NUM_CHOLESKY[self.form][1]

    def test_fantasy_call(self, *args, **kwargs):
        if self.form == "cholesky":
            return super().test_fantasy_call(*args, **kwargs)
        with pytest.raises(NotImplementedError):
            super().test_fantasy_call(*args, **kwargs)


def _suite(name, **attributes):
    return type(name, (Conformance, unittest.TestCase), {"__module__": __name__, **attributes})


for _form in Q_FORMS:
    for _objective in (tighter_gp.TighterELBO, VariationalELBO):
        _name = f"Test_{_form}_{_objective.__name__}"
        globals()[_name] = _suite(_name, form=_form, objective=_objective)

for _conditional in ("beta", "scalar"):
    _strategy = functools.partial(tighter_gp.TighterVariationalStrategy, conditional=_conditional)
    _name = f"Test_{_conditional}"
    globals()[_name] = _suite(
        _name, form="cholesky", objective=tighter_gp.TighterELBO, strategy=staticmethod(_strategy)
    )


@pytest.mark.parametrize("form", [form for form in Q_FORMS if form != "natural"])  # which GPyTorch factorises twice
def test_the_counts_are_those_of_gpytorchs_own_strategy(form):
    case = _suite("Stock", form=form, objective=VariationalELBO, strategy=VariationalStrategy)()
    case.setUp()
    case.test_training_iteration()
    case.test_eval_iteration()
