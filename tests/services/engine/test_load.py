"""Concurrent clients: separate adapters, and free capacity when a client disconnects."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from solrl_proto.rollouts import STREAM_MEDIA_TYPE
from tests.services.reward_servers import until
from tests.support.service_helpers import QUEUE_LIMIT, Layout, RunningService, adapter_file, rollout_request, scores


def test_alternating_runs_keep_their_adapters(service: RunningService, layout: Layout) -> None:
    for i, run in enumerate(("load-a", "load-b")):
        assert service.push(run, 0, adapter_file(layout, i)).status_code == 201
    refs = [("load-a", 0), ("load-b", 0), None]
    alone = [scores(service.rollout(count=25, steps=1, adapter=ref)) for ref in refs]
    assert alone[0] != alone[1] != alone[2] != alone[0]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda ref: scores(service.rollout(count=25, steps=1, adapter=ref)), refs * 2))
    assert together == alone * 2


@pytest.mark.parametrize("accept", ["application/json", STREAM_MEDIA_TYPE])
def test_a_disconnecting_client_frees_the_queue(service: RunningService, accept: str) -> None:
    def waiting() -> int:
        found: int = service.client.get("/v1/status").json()["queue"]["candidates"]
        return found

    until(lambda: waiting() == 0)  # of an earlier test
    # 200 steps: the running chunk alone would take a minute, the whole queue hours.
    filling = service.send(rollout_request(count=QUEUE_LIMIT, steps=200), accept=accept)
    until(lambda: waiting() > 0)
    assert service.client.get("/health/live").json() == {"status": "live"}
    assert service.client.get("/health/ready").status_code == 200
    assert waiting() > 0, "health was answered after the work"
    filling.leave()
    until(lambda: waiting() == 0)
    assert service.rollout(count=25, steps=1)
