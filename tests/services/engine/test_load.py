"""Concurrent clients: separate adapters, fair turns, a bounded queue, and free capacity when a client disconnects."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from solrl_proto.rollouts import STREAM_MEDIA_TYPE
from tests.support.service_helpers import (
    QUEUE_LIMIT,
    Layout,
    RawRequest,
    RunningService,
    adapter_file,
    problem,
    rollout_request,
    scores,
)


@pytest.fixture(scope="module")
def runs(service: RunningService, layout: Layout) -> list[tuple[str, int]]:
    for i, run in enumerate(("load-a", "load-b")):
        assert service.push(run, 0, adapter_file(layout, i)).status_code == 201
    return [("load-a", 0), ("load-b", 0)]


def fill_queue(service: RunningService, probe: tuple[str, int], steps: int, accept: str = "*/*") -> RawRequest:
    """Fill the whole queue with one request without an adapter, and check that it is full."""
    # One chunk may already have left the queue, so the probe is larger than one chunk.
    asked = rollout_request(count=25, steps=1, adapter=probe)
    while True:
        while service.client.post("/v1/rollouts", json=asked).status_code != 200:
            pass  # work of an earlier test is still queued
        filling = service.send(rollout_request(count=QUEUE_LIMIT, steps=steps), accept=accept)
        response = service.client.post("/v1/rollouts", json=asked)
        if response.status_code != 200:
            break
        filling.leave()  # the probe was faster
    assert (response.status_code, problem(response)["kind"]) == (429, "queue-full")
    assert 1 <= int(response.headers["retry-after"]) <= 60
    return filling


def test_alternating_runs_keep_their_adapters(service: RunningService, runs: list[tuple[str, int]]) -> None:
    refs = [*runs, None]
    alone = [scores(service.rollout(count=25, steps=1, adapter=ref)) for ref in refs]
    assert alone[0] != alone[1] != alone[2] != alone[0]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda ref: scores(service.rollout(count=25, steps=1, adapter=ref)), refs * 2))
    assert together == alone * 2


@pytest.mark.parametrize("accept", ["application/json", STREAM_MEDIA_TYPE])
def test_a_disconnecting_client_frees_the_queue(
    service: RunningService, runs: list[tuple[str, int]], accept: str
) -> None:
    # 200 steps: the running chunk alone would take a minute, the whole queue hours.
    filling = fill_queue(service, runs[0], steps=200, accept=accept)
    assert service.client.get("/health/live").json() == {"status": "live"}
    assert service.client.get("/health/ready").status_code == 200
    probe = rollout_request(count=25, steps=1, adapter=runs[0])
    assert service.client.post("/v1/rollouts", json=probe).status_code == 429, "health was answered after the work"
    filling.leave()
    while service.client.post("/v1/rollouts", json=rollout_request(count=25, steps=1)).status_code == 429:
        pass  # until the service sees the closed connection
    assert service.rollout(count=25, steps=1, adapter=runs[0])
