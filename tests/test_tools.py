"""The tools of the tests name what exists."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.tools import audit, mutation

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("file", mutation.TARGETS)
def test_a_file_to_break_has_mutants_and_its_tests_exist(file):
    assert mutation.mutants(file)
    for name in mutation.TARGETS[file]:
        assert (ROOT / "tests" / f"{name}.py").is_file(), name


@pytest.mark.parametrize(("file", "statement", "before", "after"), mutation.EQUIVALENT)
def test_a_mutant_that_may_survive_can_still_be_made(file, statement, before, after):
    found = {(mutant.statement, mutant.before, mutant.after) for mutant in mutation.mutants(file)}
    assert (statement, ast.unparse(ast.parse(before)), ast.unparse(ast.parse(after))) in found


@pytest.mark.filterwarnings("ignore")
def test_the_audit_finds_nothing_in_a_few_models():
    assert [text for text, deviations in map(audit.audit, range(20)) if deviations] == []


@pytest.mark.filterwarnings("ignore")
def test_the_audit_notices_a_divergence_that_is_off(monkeypatch):
    original = audit.kl
    monkeypatch.setattr(audit, "kl", lambda mean, cov: 1.01 * original(mean, cov))
    assert sum(bool(audit.audit(seed)[1]) for seed in range(10)) >= 5
