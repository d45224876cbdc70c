"""Services whose reward or Redis fails, and services that are stopped."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from solrl_http.serving import bind, run_server
from solrl_proto.rollouts import STREAM_MEDIA_TYPE
from solrl_rollout.store.redis_store import RedisRunStore
from tests.services.store_helpers import adapter
from tests.support.redis_server import RedisServer, running_redis
from tests.support.service_helpers import (
    Layout,
    RunningService,
    adapter_file,
    problem,
    rollout_request,
    running_service,
)
from tests.support.small_model import small_model

FATAL, PICKY, STUCK = (f"tests.services.faulty_rewards:{name}" for name in ("fatal", "picky", "stuck"))


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with running_redis("never") as server:
        yield server


@pytest.fixture(scope="module")
def frail(redis_server: RedisServer) -> Iterator[RunningService]:
    """A service with Redis and faulty rewards. The tests of this file break more and more of it, in order."""
    rewards = ["clipscore", PICKY]
    with running_service("--redis-url", redis_server.url, "--rewards", *rewards, model=small_model()) as running:
        yield running


def ask(service: RunningService, reward: str, want: str = "1") -> httpx.Response:
    request = rollout_request(count=2, steps=1, rewards=(reward,), metadata={"want": want})
    return service.client.post("/v1/rollouts", json=request)


def test_the_lag_counts_other_replicas_pushes(frail: RunningService, redis_server: RedisServer, layout: Layout) -> None:
    async def push_past_it() -> None:
        replica = RedisRunStore(redis_server.url)
        await replica.put("local", *adapter(5, 1, run="kept", model="mini-sana"))
        await replica.close()

    def lag() -> str:
        name = 'solrl_adapter_lag_versions{run="kept",tenant="local"}'
        return next(line for line in frail.client.get("/metrics").text.splitlines() if line.startswith(name)).split()[1]

    assert frail.push("kept", 1, adapter_file(layout, 1)).status_code == 201
    assert frail.rollout(adapter=("kept", 1))
    assert lag() == "0.0"
    asyncio.run(push_past_it())
    assert frail.rollout(adapter=("kept", 1))
    assert lag() == "4.0"


def test_a_failing_group_ends_the_stream_after_the_groups_before_it(frail: RunningService) -> None:
    request = rollout_request(prompts=["one", "two", "three"], count=2, rewards=(PICKY,))
    for prompt, want in zip(request["prompts"], ("1", "nan", "1"), strict=True):
        prompt["metadata"] = {"want": want}
    response = frail.client.post("/v1/rollouts", json=request, headers={"Accept": STREAM_MEDIA_TYPE})
    start, first, last = [json.loads(line) for line in response.text.splitlines()]
    assert start["kind"] == "start"
    assert (first["kind"], first["prompt_id"]) == ("group", "p0")
    assert (last["kind"], last["problem"]["type"]) == ("error", "urn:solrl:problem:reward-failed")
    assert last["problem"]["where"] == "prompts.p1"


def test_without_redis_the_base_is_served_and_readiness_ends(frail: RunningService, redis_server: RedisServer) -> None:
    assert frail.client.get("/health/ready").status_code == 200
    redis_server.kill()
    response = frail.client.get("/health/ready")
    assert (response.status_code, problem(response)["kind"]) == (503, "store-unavailable")
    address = redis_server.url.partition("//")[2].partition("/")[0]
    assert address not in response.text
    assert frail.client.get("/health/live").status_code == 200
    under = frail.client.post("/v1/rollouts", json=rollout_request(adapter=("kept", 1)))
    assert (under.status_code, problem(under)["kind"]) == (503, "store-unavailable")
    log = [json.loads(line) for line in frail.log.read_text().splitlines() if "/health/ready" in line]
    assert [(line["level"], line["store"]) for line in log] == [("warning", address)]
    assert ask(frail, "clipscore").status_code == 200


def test_after_a_signal_it_finishes_accepted_work_and_refuses_new_work(frail: RunningService) -> None:
    accepted = frail.send(rollout_request(count=120, steps=1))
    late = frail.send(rollout_request(count=1, steps=1), part=0.5)
    assert frail.client.get("/health/live").status_code == 200  # by now, both requests have been read
    frail.process.send_signal(signal.SIGTERM)
    while (refused := httpx.get(f"{frail.url}/health/ready")).is_success or problem(refused)["kind"] != "draining":
        time.sleep(0.05)
    assert (refused.status_code, int(refused.headers["retry-after"]) >= 1) == (503, True)
    new = httpx.post(f"{frail.url}/v1/rollouts", json=rollout_request(count=1, steps=1))
    assert (new.status_code, problem(new)["kind"]) == (503, "draining")
    assert httpx.get(f"{frail.url}/health/live").status_code == 200
    status, headers, body = late.response()
    assert (status, json.loads(body)["type"]) == (503, "urn:solrl:problem:draining")
    assert int(headers["retry-after"]) >= 1
    status, _, body = accepted.response()
    assert status == 200
    assert len(json.loads(body)["groups"][0]["scores"]) == 120
    assert frail.process.wait(600) == 0
    log = frail.log.read_text().splitlines()
    assert not [line for line in log if "Traceback" in line and "in picky" not in line]


def test_work_beyond_the_drain_timeout_is_cancelled() -> None:
    with running_service("--drain-timeout", "1") as service:
        endless = service.send(rollout_request(count=4096, steps=200), accept=STREAM_MEDIA_TYPE)
        while not endless.socket.recv(15):
            pass
        whole = service.send(rollout_request(count=4096, steps=200))
        assert service.client.get("/health/live").status_code == 200  # by now, the request has been read
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(600) == 0
        left = b"".join(iter(lambda: endless.socket.recv(65536), b""))
        assert b'"kind":"end"' not in left
        assert b"urn:solrl:problem:draining" in left
        status, headers, body = whole.response()
        assert (status, headers["content-type"]) == (503, "application/problem+json")
        assert json.loads(body)["type"] == "urn:solrl:problem:draining"
        assert int(headers["retry-after"]) >= 1


def test_it_ends_when_told_although_a_reward_does_not_return() -> None:
    rewards, limits = ("--rewards", STUCK), ("--live-timeout", "1", "--drain-timeout", "0")
    with running_service(*rewards, *limits) as service:
        asked = service.send(rollout_request(count=1, steps=1, rewards=rewards[1:], metadata={"stop": True}))
        asked.socket.sendall(asked.rest)
        while "a reward is stuck" not in service.log.read_text():
            time.sleep(0.05)
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(600) == 0
        log = service.log.read_text()
        assert "Traceback" not in log
        assert f"is left behind; its chunks have the rewards {STUCK}" in log


@pytest.mark.anyio
async def test_a_second_signal_stops_it_immediately() -> None:
    async def work(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.Event().wait()

    service: Any = SimpleNamespace(draining=False, dead=False)
    config = uvicorn.Config(work, lifespan="off", log_config=None)
    server, listener = uvicorn.Server(config), bind("127.0.0.1", 0)
    serving = asyncio.create_task(run_server(server, listener, service, grace=600))
    while not server.started:
        await asyncio.sleep(0.01)
    _, writer = await asyncio.open_connection(*listener.getsockname())
    writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    while not server.server_state.tasks:
        await asyncio.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    while not service.draining:
        await asyncio.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    async with asyncio.timeout(60):
        await serving
    writer.close()


def test_a_dead_engine_ends_the_process_so_that_it_can_be_restarted() -> None:
    with running_service("--rewards", "clipscore", FATAL, ends_with=2) as service:
        response = ask(service, FATAL)
        assert (response.status_code, problem(response)["kind"]) == (503, "engine-dead")
        assert service.process.wait(600) == 2
        assert "the engine thread died" in service.log.read_text()
