"""Rows of `make load` at small counts, with a real service."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
@pytest.mark.release
def test_new_run_names_win_a_tenant_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS / "load"), *sys.path])
    from fairness import starving

    made = starving(8).figures["made"]
    assert made["modest"] == 8
    # A turn is four groups, which is much of eight; a tenant that starves the other has all of its 260 names' first.
    assert made["greedy"] <= 16
