"""Rows of `make faults` and `make load` at small counts, with real processes.

Killed workers and ranks have tests of their own: test_worker_processes.py, test_ray_workers.py and test_shutdowns.py.
"""

import sys
from pathlib import Path

import pytest
from fault_trials.findings import Findings
from faults import rows

NAMES = ("redis-killed", "redis-restarted", "corrupted", "service-killed", "trainer-killed")
LONG = ("two-fronts", "divided-killed")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NAMES, *(pytest.param(one, marks=pytest.mark.release) for one in LONG)])
def test_the_guarantee_of_each_row_holds(name: str) -> None:
    row, findings = rows()[name], Findings()
    row.run(row.short, findings)
    assert findings.broken == []
    assert findings.trials >= row.short


@pytest.mark.slow
@pytest.mark.release
def test_new_run_names_win_a_tenant_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[1] / "load"), *sys.path])
    from fairness import starving

    made = starving(8).figures["made"]
    assert made["modest"] == 8
    # A turn is four groups, which is much of eight; a tenant that starves the other has all of its 260 names' first.
    assert made["greedy"] <= 16
