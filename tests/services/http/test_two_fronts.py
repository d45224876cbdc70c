"""Two services on one Redis: what happens at one is seen at the other at once."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from iteration_helpers import report
from service_helpers import Layout, RunningService, adapter_file, problem, rollout_request, running_service, scores
from support.redis_server import running_redis

RACES = 5
Fronts = tuple[RunningService, RunningService]


@pytest.fixture(scope="module")
def fronts() -> Iterator[Fronts]:
    with (
        running_redis("never") as server,
        running_service("--redis-url", server.url) as one,
        running_service("--redis-url", server.url) as other,
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


def test_of_pushes_that_race_at_both_fronts_one_wins(fronts: Fronts, layout: Layout) -> None:
    bodies = [adapter_file(layout, seed) for seed in (1, 2)]
    for version in range(RACES):
        start = threading.Barrier(2)

        def push(i: int, version: int = version, start: threading.Barrier = start) -> httpx.Response:
            start.wait()
            return fronts[i].push("raced", version, bodies[i], parent=version - 1 if version else None)

        with ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(push, (0, 1)))
        assert sorted(answer.status_code for answer in answers) == [201, 409]
        winner = next(i for i in (0, 1) if answers[i].status_code == 201)
        assert problem(answers[1 - winner])["kind"] == "version-conflict"
        for front in fronts:
            assert front.client.get(f"/v1/runs/raced/adapters/{version}/weights").content == bodies[winner]


def test_a_version_of_one_front_is_served_at_the_other(fronts: Fronts, layout: Layout) -> None:
    here, there = fronts
    assert here.push("shared", 0, adapter_file(layout, 3)).status_code == 201
    assert scores(there.rollout(adapter=("shared", 0))) == scores(here.rollout(adapter=("shared", 0)))
    assert scores(there.rollout(adapter=("shared", 0))) != scores(there.rollout())
    assert there.push("shared", 1, adapter_file(layout, 4), parent=0).status_code == 201
    assert scores(here.rollout(adapter=("shared", 1))) == scores(there.rollout(adapter=("shared", 1)))


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


def test_pins_and_deletions_at_one_front_are_seen_at_the_other(fronts: Fronts, layout: Layout) -> None:
    here, there = fronts
    assert here.push("finished", 0, adapter_file(layout, 1)).status_code == 201
    assert there.rollout(adapter=("finished", 0))
    assert here.client.put("/v1/runs/finished/adapters/0/pin").is_success
    assert there.client.get("/v1/runs/finished/adapters").json()["pinned"] == [0]
    assert here.client.delete("/v1/runs/finished").status_code == 204
    assert refusal(there, "finished", 0) == "run-not-found"
    assert "finished" not in [run["run"] for run in there.client.get("/v1/runs").json()["runs"]]


def test_curves_of_one_front_are_on_the_page_of_the_other(fronts: Fronts, layout: Layout) -> None:
    here, there = fronts

    def begin(mean: float) -> None:
        assert here.push("curve", 0, adapter_file(layout, 1)).status_code == 201
        told = here.client.post("/v1/runs/curve/iterations", json=report(0, mean).model_dump(mode="json"))
        assert told.status_code == 204

    begin(0.5)
    assert curve(there, "curve") == ([0], [0.5])
    more = here.client.post("/v1/runs/curve/iterations", json=report(1, 0.6).model_dump(mode="json"))
    assert more.status_code == 204
    assert curve(there, "curve") == ([0, 1], [0.5, 0.6])
    # A new run of the same name: `there` still has the old curve in memory.
    assert here.client.delete("/v1/runs/curve").status_code == 204
    begin(0.7)
    assert curve(there, "curve") == ([0], [0.7])
