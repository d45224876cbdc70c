"""Throughput of the last minute."""

import pytest
from solrl_rollout.status.throughput import PARTS, WINDOW, FinishedChunk, RecentThroughput


def finished(tenant: str, start: float, end: float, candidates: int = 24, switched: bool = False) -> FinishedChunk:
    return FinishedChunk(tenant, "r", "m", "bf16", candidates, 6, start, end, switched, 0.0, end - start, 0.0)


def test_throughput_is_counted_per_tenant_and_a_new_service_divides_by_its_age() -> None:
    now = 0.0
    throughput = RecentThroughput(lambda: now)
    now = 10.0
    throughput.add(finished("young", 4.0, 10.0))
    young = throughput.of_tenant("young")
    assert (young.window, young.candidates_per_second) == (10.0, 2.4)
    now = 100.0
    throughput.add(finished("a", 80.0, 92.0, switched=True))
    throughput.add(finished("a", 92.0, 98.0))
    throughput.add(finished("b", 98.0, 99.0, candidates=1000))
    seen = throughput.of_tenant("a")
    assert seen.window == WINDOW
    assert seen.candidates_per_second == pytest.approx(48 / WINDOW)
    assert (seen.switches, seen.step_seconds) == (1, 1.5)
    assert len(seen.history) == PARTS
    assert sum(seen.history) * WINDOW / PARTS == pytest.approx(48, abs=0.1)
    assert seen.history[:8] == (0,) * 8
    assert throughput.of_tenant("c").step_seconds is None
    assert throughput.of_tenant("a", busy=True).history[-1] == 4.0
    assert throughput.of_tenant("c", busy=True).candidates_per_second == 0
    now = 152.5
    assert throughput.of_tenant("a").candidates_per_second == pytest.approx(24 * 5.5 / 6 / WINDOW, abs=1e-3)
    now = 200.0
    assert throughput.of_tenant("a").candidates_per_second == throughput.of_tenant("b").switches == 0
