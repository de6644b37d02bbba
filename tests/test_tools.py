"""The tools of the tests name what exists, and notice what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools import audit, mutation

ROOT = Path(__file__).resolve().parent


def test_every_file_to_break_has_mutants_and_its_tests_exist():
    assert mutation.mutants("maths/moments.py")
    for file, tests in mutation.TARGETS.items():
        assert (ROOT.parent / "tighter_gp" / file).is_file(), file
        assert all((ROOT / f"{name}.py").is_file() for name in tests), tests


@pytest.mark.filterwarnings("ignore")
def test_the_audit_finds_nothing_in_a_few_models_and_notices_a_divergence_that_is_off(monkeypatch):
    assert [text for text, deviations in map(audit.audit, range(20)) if deviations] == []
    original = audit.kl
    monkeypatch.setattr(audit, "kl", lambda mean, cov: 1.01 * original(mean, cov))
    assert sum(bool(audit.audit(seed)[1]) for seed in range(10)) >= 5
