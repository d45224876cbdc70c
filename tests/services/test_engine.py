"""The engine thread: it stops what nobody wants any more, and when it dies that is seen and nothing hangs."""

import time
from collections.abc import AsyncIterator
from concurrent.futures import CancelledError
from dataclasses import replace

import httpx
import pytest
from fastapi import FastAPI
from faulty_rewards import fatal
from service_helpers import problem, rollout_request
from solrl_proto import Plan, PromptItem
from solrl_proto.problems import ProblemError
from solrl_rollout.engine.engine import Engine
from solrl_rollout.engine.work import Chunk, Job
from solrl_rollout.http.app import create_app
from solrl_rollout.settings import Settings
from solrl_rollout.status.metrics import Telemetry

FATAL = f"{fatal.__module__}:{fatal.__name__}"


def test_a_cancelled_job_stops_at_its_next_step_and_no_other_does() -> None:
    engine = Engine(Settings(), Telemetry())
    engine.start().result()
    try:
        job, other = (
            Job("t", "a", "mini-sana", None, "nvfp4", Plan(steps=steps), ("clipscore",), images=False)
            for steps in (200, 1)
        )
        running, waiting, kept = (
            Chunk(one, PromptItem(id="p", text="a red circle"), range(24)) for one in (job, job, other)
        )
        engine.submit([running, waiting, kept])
        while not running.done.running():
            time.sleep(0.01)
        engine.cancel(job)
        with pytest.raises(ProblemError):
            running.done.result()
        with pytest.raises(CancelledError):
            waiting.done.result()
        assert len(kept.done.result().rewards["clipscore"]) == 24
        # What the engine measured of each precision decides the turns: after the second chunk of a kind.
        for precision in ("nvfp4", "bf16", "bf16"):
            chunk = Chunk(replace(other, precision=precision), PromptItem(id="p", text="a red circle"), range(2))
            engine.submit([chunk])
            chunk.done.result()
        assert engine.costs.of(chunk.kind) != 1.0
        with engine._wake:
            engine._queue.put([chunk])
            engine._queue.take()
        assert engine._queue._served[chunk.run] == pytest.approx(2 * engine.costs.of(chunk.kind))
    finally:
        engine.close()


def test_a_cancelled_job_keeps_no_room_for_its_survivors() -> None:
    engine = Engine(Settings(queue_limit=24), Telemetry())
    job = Job("t", "a", "mini-sana", None, "nvfp4", Plan(steps=2), ("clipscore",), images=False)
    prompt = PromptItem(id="p", text="a red circle")
    engine.submit([Chunk(job, prompt, range(24), until=1, returning=24)])
    engine._queue.take()
    with pytest.raises(ProblemError):
        engine.submit([Chunk(job, prompt, range(1))])
    engine.cancel(job)
    engine.submit([Chunk(job, prompt, range(24))])


@pytest.fixture
async def app() -> AsyncIterator[FastAPI]:
    app = create_app(Settings(rewards=("clipscore", FATAL)))
    async with app.router.lifespan_context(app):
        yield app


@pytest.mark.anyio
async def test_a_dead_engine_thread_is_seen_everywhere(app: FastAPI) -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://service") as client:

        async def ask(reward: str) -> httpx.Response:
            # Two chunks: the second one waits when the first one kills the thread.
            return await client.post("/v1/rollouts", json=rollout_request(count=25, steps=1, rewards=(reward,)))

        for path in ("/health/live", "/health/ready"):
            assert (await client.get(path)).status_code == 200
        for response in (
            await ask(FATAL),
            await ask("clipscore"),
            await client.get("/health/live"),
            await client.get("/health/ready"),
        ):
            assert (response.status_code, problem(response)["kind"]) == (503, "engine-dead")
