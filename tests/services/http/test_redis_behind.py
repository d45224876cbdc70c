"""A service process on a real Redis: many readers at once, and garbage among the records."""

import asyncio
from collections.abc import Iterator

import httpx
import pytest
import redis
from iteration_helpers import report
from service_helpers import Layout, RunningService, adapter_file, problem, running_service
from support.redis_server import RedisServer, running_redis

READERS = 200


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with running_redis("never") as running:
        yield running


@pytest.fixture(scope="module")
def service(server: RedisServer, layout: Layout) -> Iterator[RunningService]:
    """With two runs, each of which has reported an iteration."""
    with running_service("--redis-url", server.url) as running:
        for run in ("run-a", "run-b"):
            assert running.push(run, 0, adapter_file(layout, 1)).status_code == 201
            told = running.client.post(f"/v1/runs/{run}/iterations", json=report(0).model_dump(mode="json"))
            assert told.status_code == 204
        yield running
        assert "Traceback" not in running.log.read_text()


async def get_at_once(url: str, count: int) -> list[httpx.Response]:
    """`count` answers, each on a connection of its own and asked for at the same moment."""
    limits = httpx.Limits(max_connections=count)
    async with httpx.AsyncClient(limits=limits, timeout=600) as client:
        return await asyncio.gather(*(client.get(url) for _ in range(count)))


@pytest.mark.parametrize("path", ["/v1/runs", "/v1/status"])
def test_all_of_many_readers_are_answered(service: RunningService, path: str) -> None:
    answers = asyncio.run(get_at_once(service.url + path, READERS))
    assert [answer.status_code for answer in answers] == [200] * READERS
    assert all([run["run"] for run in answer.json()["runs"]] == ["run-a", "run-b"] for answer in answers)


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
