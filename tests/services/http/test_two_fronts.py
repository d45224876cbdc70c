"""Two services on one Redis: what happens at one is seen at the other at once."""

from collections.abc import Iterator

import pytest
from tests.services.iteration_helpers import report, tell
from tests.support.redis_server import running_redis
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
