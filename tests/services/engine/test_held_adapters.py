"""Adapters that waiting requests hold are bounded, and given back however a request ends."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from fake_backend import REWARD, FakeBackend, Gate
from fastapi import FastAPI
from service_helpers import MODEL, adapter_file, adapter_headers, client_of, problem, rollout_request
from solrl_rollout.http.app import create_app
from solrl_rollout.settings import RolloutSettings

pytestmark = pytest.mark.anyio

LAYOUT = {"linear": (4, 4)}
SIZE = len(adapter_file(LAYOUT, 0))


@asynccontextmanager
async def client_with_runs(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a service with two runs, each with an adapter of its own."""
    async with client_of(app) as client:
        for seed, run in enumerate(("a", "b")):
            body = adapter_file(LAYOUT, seed)
            url = f"/v1/runs/{run}/adapters/0?model={MODEL}"
            assert (await client.put(url, content=body, headers=adapter_headers(body))).status_code == 201
        yield client


def work(run: str, text: str = "free", **more: Any) -> dict[str, Any]:
    return rollout_request(prompts=[text], adapter=(run, 0), steps=1, rewards=(REWARD,), **more)


async def test_requests_beyond_the_bound_are_told_to_come_again() -> None:
    gate = Gate()
    settings = RolloutSettings(rewards=(REWARD,), max_adapter_bytes=SIZE, max_queued_adapter_bytes=SIZE)
    async with client_with_runs(create_app(settings, load_backend=FakeBackend(on_step=gate).load)) as client:
        held = [asyncio.create_task(client.post("/v1/rollouts", json=work("a", "held"))) for _ in range(5)]
        while not gate.reached.is_set():
            await asyncio.sleep(0.01)
        refused = await client.post("/v1/rollouts", json=work("b"))
        assert (refused.status_code, problem(refused)["kind"]) == (503, "too-many-bytes")
        assert int(refused.headers["retry-after"]) > 0
        gate.opened.set()
        assert [answer.status_code for answer in await asyncio.gather(*held)] == [200] * 5
        for run in ("b", "a", "b"):
            assert (await client.post("/v1/rollouts", json=work(run))).status_code == 200


async def test_a_request_that_the_queue_refuses_holds_nothing() -> None:
    gate = Gate()
    settings = RolloutSettings(rewards=(REWARD,), queue_limit=4)
    app = create_app(settings, load_backend=FakeBackend(on_step=gate).load)
    async with client_with_runs(app) as client:
        running = asyncio.create_task(client.post("/v1/rollouts", json=work("a", "held", count=4)))
        while not gate.reached.is_set():
            await asyncio.sleep(0.01)
        waiting = asyncio.create_task(client.post("/v1/rollouts", json=work("a", count=3)))
        while app.state.service.engine.waiting("local")[0] == []:
            await asyncio.sleep(0.01)
        assert (await client.post("/v1/rollouts", json=work("b", count=2))).status_code == 429
        assert app.state.service.adapters.held.bytes == SIZE
        gate.opened.set()
        await asyncio.gather(running, waiting)
        assert app.state.service.adapters.held.bytes == 0
