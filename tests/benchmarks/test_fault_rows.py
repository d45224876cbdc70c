"""Rows of `make faults` at a small count, with real processes.

Killed workers and ranks have tests of their own: test_worker_processes.py, test_ray_workers.py and test_shutdowns.py.
"""

import pytest
from fault_trials.findings import Findings
from faults import rows

NAMES = ("redis-killed", "redis-restarted", "corrupted", "service-killed", "trainer-killed")
LONG = ("two-fronts", "streamed-killed")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*NAMES, *(pytest.param(one, marks=pytest.mark.release) for one in LONG)])
def test_the_guarantee_of_each_row_holds(name: str) -> None:
    row, findings = rows()[name], Findings()
    row.run(row.short, findings)
    assert findings.broken == []
    assert findings.trials >= row.short
