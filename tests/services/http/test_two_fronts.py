"""Two services on one Redis: what happens at one is seen at the other at once."""

from collections.abc import Iterator

import pytest
import redis
from tests.services.iteration_helpers import report, tell
from tests.support.redis_server import RedisServer, running_redis
from tests.support.service_helpers import (
    Layout,
    RunningService,
    adapter_file,
    problem,
    rollout_request,
    running_service,
    scores,
)
from tests.support.small_model import small_model

Fronts = tuple[RunningService, RunningService]


@pytest.fixture(scope="module")
def fronts() -> Iterator[Fronts]:
    with (
        running_redis("never") as server,
        running_service("--redis-url", server.url, model=small_model()) as one,
        running_service("--redis-url", server.url, model=small_model()) as other,
    ):
        yield one, other
        assert all("Traceback" not in front.log.read_text() for front in (one, other))


def refusal(front: RunningService, run: str, version: int) -> str:
    """Kind of the problem with which a front refuses to explore under a version."""
    answer = front.client.post("/v1/rollouts", json=rollout_request(adapter=(run, version)))
    assert answer.status_code == 404, answer.text
    kind: str = problem(answer)["kind"]
    return kind


def curve(front: RunningService, run: str) -> tuple[list[int], list[float]]:
    """Iterations and mean scores of a run on a front's page."""
    (found,) = (one for one in front.client.get("/v1/status").json()["runs"] if one["run"] == run)
    return found["curve"]["iterations"], found["curve"]["series"]["mean"]


def test_going_back_at_one_front_is_seen_at_the_other(fronts: Fronts, layout: Layout) -> None:
    here, there = fronts
    for version in range(3):
        assert here.push("back", version, adapter_file(layout, version), version - 1 if version else None).is_success
    before = scores(there.rollout(adapter=("back", 1)))
    gone = here.client.delete("/v1/runs/back/adapters", params={"after": 0, "head": 2})
    assert gone.status_code == 204, gone.text
    assert refusal(there, "back", 1) == "version-not-found"
    assert there.client.get("/v1/runs/back/adapters").json()["head"] == 0
    # The same number with other content: `there` still has the old one in memory.
    assert here.push("back", 1, adapter_file(layout, 9), parent=0).status_code == 201
    after = scores(there.rollout(adapter=("back", 1)))
    assert before != after == scores(here.rollout(adapter=("back", 1)))


def test_a_deletion_at_one_front_is_seen_at_the_other(fronts: Fronts, layout: Layout) -> None:
    here, there = fronts
    assert here.push("finished", 0, adapter_file(layout, 1)).status_code == 201
    assert there.rollout(adapter=("finished", 0))
    assert here.client.delete("/v1/runs/finished").status_code == 204
    assert refusal(there, "finished", 0) == "run-not-found"
    assert "finished" not in [run["run"] for run in there.client.get("/v1/runs").json()["runs"]]


def test_curves_of_one_front_are_on_the_page_of_the_other(fronts: Fronts, layout: Layout) -> None:
    here, there = fronts
    assert here.push("curve", 0, adapter_file(layout, 1)).status_code == 201
    for iteration, means in ((0, [0.5]), (1, [0.5, 0.6])):
        assert tell(here, "curve", report(iteration, means[-1])).status_code == 204
        assert curve(there, "curve") == ([0, 1][: iteration + 1], means)
    # A new run of the same name: `there` still has the old curve in memory.
    assert here.client.delete("/v1/runs/curve").status_code == 204
    assert here.push("curve", 0, adapter_file(layout, 1)).status_code == 201
    assert tell(here, "curve", report(0, 0.7)).status_code == 204
    assert curve(there, "curve") == ([0], [0.7])


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with running_redis("never") as running:
        yield running


@pytest.fixture(scope="module")
def service(server: RedisServer, layout: Layout) -> Iterator[RunningService]:
    """With two runs, each of which has reported an iteration."""
    with running_service("--redis-url", server.url, model=small_model()) as running:
        for run in ("run-a", "run-b"):
            assert running.push(run, 0, adapter_file(layout, 1)).status_code == 201
            assert tell(running, run, report(0)).status_code == 204
        yield running
        assert "Traceback" not in running.log.read_text()


def test_garbage_of_one_run_hides_no_other(service: RunningService, server: RedisServer) -> None:
    run = "solrl:{local}:run:run-a"
    with redis.Redis.from_url(server.url) as client:
        client.hset(f"{run}:progress", mapping={"last": "garbage", "samples": "garbage"})
        client.zadd(f"{run}:iterations", {"garbage": 1})
        (damaged, whole) = service.client.get("/v1/status").json()["runs"]
        assert (damaged["run"], damaged["last"]) == ("run-a", None)
        assert (whole["run"], whole["last"]["iteration"]) == ("run-b", 0)
        detail = service.client.get("/v1/runs/run-a/iterations").json()
        assert (detail["curve"]["iterations"], detail["samples"]) == ([0], None)

        client.hset(f"{run}:versions", "head", "garbage")
        for path in ("/v1/status", "/v1/runs"):
            assert [one["run"] for one in service.client.get(path).json()["runs"]] == ["run-b"]
    refused = service.client.get("/v1/runs/run-a/adapters")
    assert (refused.status_code, problem(refused)["kind"]) == (500, "adapter-corrupt")
    # Each record once, however often it is read: progress, samples, iteration, and the run itself.
    assert service.log.read_text().count("run 'run-a' is damaged in the store, and omitted") == 4
    assert service.client.delete("/v1/runs/run-a").status_code == 204
