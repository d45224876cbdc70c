"""Rows of `make faults` at a small count, with real processes.

Killed workers and ranks have tests of their own: test_worker_processes.py, test_ray_workers.py and test_shutdowns.py.
"""

import pytest
from fault_trials import (
    corrupted,
    redis_killed,
    redis_restarted,
    service_killed,
    streamed_killed,
    trainer_killed,
    two_fronts,
)
from fault_trials.findings import Findings, Row

MODULES = (redis_killed, redis_restarted, corrupted, service_killed, trainer_killed)
LONG = (two_fronts, streamed_killed)
ROWS = [module.ROW for module in MODULES] + [pytest.param(one.ROW, marks=pytest.mark.release) for one in LONG]


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_guarantee_of_each_row_holds(row: Row) -> None:
    findings = Findings()
    row.run(row.short, findings)
    assert findings.broken == []
    assert findings.trials >= row.short
