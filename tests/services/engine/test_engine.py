"""The engine thread: turns, cancellation, capacity, and its end, which every route reports."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import CancelledError
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from solrl_core.sampling.noise import initial_noise
from solrl_engine.backend import GenerationRequest
from solrl_proto.problems import ProblemError
from solrl_rollout.engine.errors import EngineDeadError
from solrl_rollout.engine.queue.scheduler import Scheduler
from solrl_rollout.engine.work import ScoredChunk
from solrl_rollout.http.app import create_app
from solrl_rollout.settings import RolloutSettings
from solrl_rollout.status.rollout_metrics import RolloutMetrics
from tests.services.fake_backend import REWARD, SHAPE, FakeBackend, Gate, chunk, fault_of, job, running_engine, scored
from tests.support.service_helpers import MODEL, adapter_file, adapter_headers, client_of, problem, rollout_request

FATAL = "tests.services.faulty_rewards:fatal"


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.opened.set()


def test_only_the_cancelled_job_stops_at_its_next_step(gate: Gate) -> None:
    with running_engine(FakeBackend(on_step=gate), gate.opened) as engine:
        cancelled = job(steps=200)
        running, waiting, other = chunk(cancelled, "held"), chunk(cancelled), chunk(job())
        engine.scheduler.submit([running, waiting, other])
        assert gate.reached.wait(600)
        engine.cancel(cancelled)
        (ping,) = engine.ping()
        gate.opened.set()
        ping.result(600)
        fault_of(running)
        with pytest.raises(CancelledError):
            waiting.result.result(600)
        assert torch.equal(other.result.result(600).rewards[REWARD], initial_noise(range(4), SHAPE).mean((1, 2, 3)))


def test_turns_depend_on_the_measured_seconds_of_a_kind_of_work(monkeypatch: pytest.MonkeyPatch, gate: Gate) -> None:
    now, order = [0.0], []

    def step(request: GenerationRequest) -> None:
        gate(request)
        order.append(request.precision)
        now[0] += 8.0 if request.precision == "nvfp4" else 1.0

    monkeypatch.setattr("solrl_core.sampling.device_events.time", SimpleNamespace(monotonic=lambda: now[0]))
    with running_engine(FakeBackend(on_step=step), gate.opened) as engine:
        slow, fast = job("slow", precision="nvfp4"), job("fast")
        for of in (slow, fast, slow, fast):  # the first chunk of each kind is not measured
            scored(engine, chunk(of))
        engine.scheduler.submit([chunk(job("first"), "held")])
        assert gate.reached.wait(600)
        # A turn has four chunks. At eight times the cost, one turn of the slow run equals eight turns of the fast run.
        chunks = [chunk(of) for of in (slow, fast) for _ in range(40)]
        engine.scheduler.submit(chunks)
        order.clear()
        gate.opened.set()
        for one in chunks:
            one.result.result(600)
    served = order[1:41]
    assert 32 <= served.count("bf16") <= 36


def test_closing_cancels_unfinished_work_and_ends_the_backend(gate: Gate) -> None:
    backend = FakeBackend(on_step=gate)
    with running_engine(backend, gate.opened) as engine:
        running, waiting = chunk(job(steps=200), "held"), chunk(job())
        engine.scheduler.submit([running, waiting])
        assert gate.reached.wait(600)
    for one in (running, waiting):
        with pytest.raises(EngineDeadError):
            one.result.result(0)
    assert backend.closed


def test_an_adapter_is_set_only_if_a_different_one_was_served() -> None:
    backend = FakeBackend()
    with running_engine(backend) as engine:
        one, other = (SimpleNamespace(digest=name, adapter=None) for name in ("one", "other"))
        backend.served.clear()
        switched = []
        for adapter, precision in ((None, "bf16"), (one, "bf16"), (one, "bf16"), (one, "nvfp4"), (other, "bf16")):
            part = chunk(job(adapter=adapter, precision=precision))  # type: ignore[arg-type]
            switched.append(scored(engine, part).switched)
    assert switched == [False, True, False, True, True]
    assert backend.served == [("bf16", "one"), ("nvfp4", "one"), ("bf16", "other")]


def test_the_engine_survives_a_failed_chunk_and_ends_if_its_backend_dies() -> None:
    prompts = [""]

    def fail(request: GenerationRequest) -> None:
        prompts.append(request.prompt)
        if request.prompt in ("bad", "fatal"):
            raise KeyError("a bug")

    def check() -> None:
        if prompts[-1] == "fatal":
            raise ConnectionError("the worker is gone")

    backend = FakeBackend(on_step=fail)
    backend.check = check  # type: ignore[method-assign]
    with running_engine(backend) as engine:
        with pytest.raises(ProblemError) as refused:
            scored(engine, chunk(job(), "bad"))
        assert refused.value.problem.kind == "generation-failed"
        assert scored(engine, chunk(job())).rewards
        failed, waiting = chunk(job(), "fatal"), chunk(job())
        engine.scheduler.submit([failed, waiting])
        for one, kind in ((failed, "generation-failed"), (waiting, "engine-dead")):
            assert fault_of(one).problem.kind == kind
    assert engine.scheduler.dead


@pytest.mark.parametrize(("serving", "seconds"), [(1, 20), (2, 10), (4, 5)])
@pytest.mark.parametrize(("generate", "reward", "asked"), [(4.0, 1.0, 0.0), (1.0, 4.0, 0.0), (3.0, 54.0, 50.0)])
def test_retry_after_counts_the_workers_that_serve_and_no_time_at_reward_servers(
    serving: int, seconds: int, generate: float, reward: float, asked: float
) -> None:
    """The worker takes 4 seconds for 4 candidates."""
    scheduler = Scheduler(RolloutSettings(rewards=(REWARD,), queue_limit=20), RolloutMetrics())
    scheduler.serving = serving
    scored = ScoredChunk({}, None, 0.0, False, 9.0, generate, reward, asked)
    scheduler.record("fake:0", chunk(job()), scored)
    scheduler.submit([chunk(job(), count=20)])
    with pytest.raises(ProblemError) as refused:
        scheduler.submit([chunk(job())])
    assert refused.value.retry_after == seconds


@pytest.mark.anyio
async def test_every_route_reports_a_dead_engine_thread() -> None:
    def asked(reward: str) -> dict[str, Any]:
        # Two chunks: the second one is waiting when the first one kills the thread.
        return rollout_request(count=25, steps=1, rewards=(reward,))

    async with client_of(create_app(RolloutSettings(rewards=(REWARD, FATAL)), load_backend=FakeBackend)) as client:
        for path in ("/health/live", "/health/ready"):
            assert (await client.get(path)).status_code == 200
        answers = [await client.post("/v1/rollouts", json=asked(reward)) for reward in (FATAL, REWARD)]
        for response in (*answers, await client.get("/health/live"), await client.get("/health/ready")):
            assert (response.status_code, problem(response)["kind"]) == (503, "engine-dead")


async def push(client: httpx.AsyncClient, run: str) -> int:
    """Push an adapter of its own for a run; returns its size."""
    adapter = adapter_file({"linear": (4, 4)}, seed=len(run))
    url = f"/v1/runs/{run}/adapters/0?model={MODEL}"
    assert (await client.put(url, content=adapter, headers=adapter_headers(adapter))).status_code == 201
    return len(adapter)


@pytest.mark.anyio
async def test_adapters_of_refused_and_of_finished_requests_are_given_back(gate: Gate) -> None:
    settings = RolloutSettings(rewards=(REWARD,), queue_limit=4)
    app = create_app(settings, load_backend=FakeBackend(on_step=gate).load)
    async with client_of(app) as client:

        async def ask(run: str, text: str, count: int) -> int:
            body = rollout_request(prompts=[text], adapter=(run, 0), steps=1, rewards=(REWARD,), count=count)
            return (await client.post("/v1/rollouts", json=body)).status_code

        size, _ = await push(client, "a"), await push(client, "other")
        running = asyncio.create_task(ask("a", "held", 4))
        await asyncio.to_thread(gate.reached.wait, 600)
        waiting = asyncio.create_task(ask("a", "free", 3))
        while not app.state.service.engine.waiting("local")[0]:
            await asyncio.sleep(0.01)
        assert await ask("other", "free", 2) == 429
        assert app.state.service.adapters.memory.bytes == size
        gate.opened.set()
        assert await asyncio.gather(running, waiting) == [200, 200]
        assert app.state.service.adapters.memory.bytes == 0
