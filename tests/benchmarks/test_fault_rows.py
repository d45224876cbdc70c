"""Rows of `make faults` at a small count, with real processes; test_ray_workers.py has that of Ray."""

import pytest
from fault_trials import (
    abandoned,
    corrupted,
    races,
    rank_killed,
    redis_killed,
    redis_restarted,
    service_killed,
    trainer_killed,
    two_fronts,
    worker_killed,
)
from fault_trials.findings import Findings, Row

MODULES = (
    *(races, two_fronts, redis_killed, redis_restarted, corrupted, abandoned),
    *(service_killed, worker_killed, trainer_killed, rank_killed),
)
ROWS = [module.ROW for module in MODULES]


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_guarantee_of_each_row_holds(row: Row) -> None:
    findings = Findings()
    row.run(row.short, lambda text: None, findings)
    assert findings.broken == []
    assert findings.trials >= row.short
