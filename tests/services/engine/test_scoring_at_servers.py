"""Chunks whose rewards servers compute: others are made meanwhile, up to a bound; each gets its own scores."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from time import sleep
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from solrl_client import background
from solrl_core.rewards.images import as_floats, as_uint8
from solrl_core.sampling.noise import initial_noise
from solrl_engine.backend import GenerationRequest
from solrl_proto.problems import ProblemError
from solrl_proto.rollouts import Plan, PromptItem
from solrl_rollout.engine import external_rewards
from solrl_rollout.engine.chunk_scorer import ChunkScorer
from solrl_rollout.engine.engine import Engine
from solrl_rollout.engine.work import Chunk, ExternalReward, Job
from solrl_rollout.engine.workers import process_workers
from solrl_rollout.engine.workers.local import LocalWorker
from solrl_rollout.settings import RolloutSettings
from solrl_rollout.status.rollout_metrics import RolloutMetrics
from tests.services.fake_backend import (
    REWARD,
    SHAPE,
    Events,
    FakeBackend,
    Observed,
    engine_of,
    fault_of,
    running_engine,
    settle,
)
from tests.services.reward_servers import NAME, Misbehaving, RewardProcess, serving, until

HELD = "tests.services.served_rewards:held"
BOUND = 3
COUNT = 4
PATIENT = {"timeout": 600}
"""Options of a reward: its server may be held up for as long as a busy machine needs for the rest of a test."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RewardProcess]:
    process = RewardProcess(tmp_path_factory.mktemp("reward"), HELD)
    with closing(process):
        process.start()
        yield process


@pytest.fixture
def backend() -> Observed:
    return Observed(Events())


@pytest.fixture(params=[True, False], ids=["scored beside", "scored between"])
def engine(
    request: pytest.FixtureRequest, server: RewardProcess, backend: Observed, tmp_path: Path
) -> Iterator[Engine]:
    with engine_beside(server, backend, tmp_path, overlap=request.param) as running:
        yield running


@contextmanager
def engine_beside(
    server: RewardProcess, backend: Observed, folder: Path, *, bound: int = BOUND, overlap: bool = True
) -> Iterator[Engine]:
    """A running engine whose `held` this server computes; the gate in the folder is opened at the end."""
    rewards = (REWARD, f"{HELD}@{server.address}")
    options: Any = {"rewards": rewards, "reward_options": {HELD: PATIENT}, "scoring_in_flight": bound}
    with running_engine(backend.without(overlaps=overlap), **options) as engine:
        backend.events.seen.clear()
        backend.batches.clear()
        try:
            yield engine
        finally:
            open_gate(folder)


@contextmanager
def engine_with(
    app: Misbehaving, in_flight: int, backend: FakeBackend | None = None, **settings: Any
) -> Iterator[Engine]:
    """A running engine with this server's reward, and its worker in a process of its own, or here on a backend."""
    with serving(app) as address:
        own = RolloutSettings(
            rewards=(REWARD, f"{NAME}@{address}"),
            reward_options={NAME: PATIENT},
            device="cpu",
            scoring_in_flight=in_flight,
            **settings,
        )
        metrics = RolloutMetrics()
        if backend is None:
            engine = Engine(own, metrics, process_workers(own, ["cpu"], metrics, FakeBackend))
        else:
            engine = engine_of(own, backend.load)
        try:
            engine.start().result(600)
            yield engine
        finally:
            app.leave.set()
            engine.close()


def chunk(
    name: str, folder: Path, *rewards: str, events: Events | None = None, brings: RewardProcess | None = None
) -> Chunk:
    """A chunk whose seeds are its own; `-name` is an event of its result. `brings`: its run's own server of `held`."""
    own = {} if brings is None else {HELD: ExternalReward(brings.address, None)}
    names = rewards or (HELD, REWARD)
    job = Job("t", "r", "mini-sana", None, "bf16", Plan(steps=1), names, images=False, external_rewards=own)
    prompt = PromptItem(id=name, text=name, metadata={"folder": str(folder)})
    made = Chunk(job, prompt, range(COUNT * ord(name), COUNT * (ord(name) + 1)))
    if events is not None:
        made.result.add_done_callback(lambda _: events.add(f"-{name}"))
    return made


def images_of(one: Chunk) -> torch.Tensor:
    """The images that the backend makes of a chunk's seeds."""
    return initial_noise(one.seeds, SHAPE)


def assert_scored(one: Chunk) -> None:
    """A chunk has the scores of its images: of 8 bits at the server, of floats here."""
    rewards = one.result.result(600).rewards
    assert list(rewards) == list(one.job.rewards)
    expected = {HELD: as_floats(as_uint8(images_of(one))), REWARD: images_of(one)}
    for name, values in rewards.items():
        assert torch.equal(values, expected[name].mean((1, 2, 3)))


def open_gate(folder: Path) -> None:
    (folder / "open").touch()


def test_chunks_are_made_while_others_are_scored_up_to_a_bound(
    engine: Engine, server: RewardProcess, backend: Observed, tmp_path: Path
) -> None:
    events = backend.events
    chunks = [chunk(name, tmp_path, events=events) for name in "abcdefg"]
    engine.scheduler.submit(chunks)
    events.wait_for("*d")
    until(lambda: server.waiting == (BOUND - 1) * COUNT)  # it scores one chunk
    settle(engine)
    assert events.seen == ["+a", "*a", "+b", "*b", "+c", "*c", "+d", "*d"]
    assert server.waiting == (BOUND - 1) * COUNT
    open_gate(tmp_path)
    for one in chunks:
        assert_scored(one)
    assert events.seen.index("+e") > min(events.seen.index(f"-{name}") for name in "abc")
    assert engine.workers[0].chunks == len(chunks)


def test_a_waiting_chunk_is_cancelled_at_once(server: RewardProcess, backend: Observed, tmp_path: Path) -> None:
    with engine_beside(server, backend, tmp_path, bound=1) as engine:
        asked, waits, after = (chunk(name, tmp_path) for name in "abc")
        engine.scheduler.submit([asked, waits, after])
        backend.events.wait_for("*b")
        settle(engine)
        sleep(0.2)  # the thread sleeps by now, and must be woken
        engine.cancel(waits.job)
        fault_of(waits)
        backend.events.wait_for("*c")
        assert not asked.result.done()
        open_gate(tmp_path)
        assert_scored(asked)
        assert_scored(after)


def test_memory_is_not_waited_for_at_a_server(engine: Engine, backend: Observed, tmp_path: Path) -> None:
    def run_out(request: GenerationRequest) -> None:
        if request.prompt == "b" and len(request.seeds) == COUNT:
            raise torch.OutOfMemoryError("no room for all")

    backend.fault = run_out
    held, other = chunk("a", tmp_path), chunk("b", tmp_path, REWARD)
    engine.scheduler.submit([held])
    backend.events.wait_for("*a")
    settle(engine)
    backend.batches.clear()
    engine.scheduler.submit([other])
    assert_scored(other)
    assert backend.batches == [COUNT // 2] * 2
    assert not held.result.done()


def test_a_server_that_dies_fails_the_chunks_that_it_scores_and_no_others(backend: Observed, tmp_path: Path) -> None:
    server = RewardProcess(tmp_path, HELD)
    server.start()
    with closing(server), engine_beside(server, backend, tmp_path) as engine:
        chunks = [chunk(name, tmp_path) for name in "abcdef"]
        engine.scheduler.submit(chunks)
        until(lambda: server.waiting == (BOUND - 1) * COUNT)
        server.close()
        for one in chunks:
            fault = fault_of(one)
            assert (fault.retry_after, fault.problem.where) == (5, f"prompts.{one.prompt.id}")
        assert f'solrl_reward_errors_total{{reward="{HELD}"}} 6.0' in engine._metrics.exposition().decode()
        other = chunk("g", tmp_path, REWARD)
        engine.scheduler.submit([other])
        assert_scored(other)
        open_gate(tmp_path)
        server.start()
        again = chunk("h", tmp_path)
        engine.scheduler.submit([again])
        assert_scored(again)
        assert not engine.scheduler.dead


def test_closing_awaits_servers_and_cancels_the_rest(server: RewardProcess, backend: Observed, tmp_path: Path) -> None:
    with engine_beside(server, backend, tmp_path, bound=1) as engine:
        chunks = [chunk(name, tmp_path) for name in "abc"]
        engine.scheduler.submit(chunks)
        backend.events.wait_for("*b")
        settle(engine)
    assert all(one.result.done() for one in chunks)
    assert engine.scheduler.dead


def test_a_server_that_a_run_brings_delays_no_others(
    server: RewardProcess, backend: Observed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(external_rewards, "TIMEOUT", 600.0)
    with engine_with(Misbehaving(), 2, backend.without(overlaps=True), reward_hosts=(server.address,)) as engine:
        try:
            own = [chunk(name, tmp_path, brings=server) for name in "abcd"]
            engine.scheduler.submit(own)
            until(lambda: server.waiting == COUNT)  # it scores one chunk
            others = [chunk(name, tmp_path, *names) for names in ((REWARD,), (NAME, REWARD)) for name in "ef"]
            engine.scheduler.submit(others)
            for one in others:
                assert torch.equal(one.result.result(600).rewards[REWARD], images_of(one).mean((1, 2, 3)))
            settle(engine)
            assert not {"+c", "+d"} & set(backend.events.seen), "as many as it may have are at the server"
            assert not any(one.result.done() for one in own)
        finally:
            open_gate(tmp_path)
        for one in own:
            assert_scored(one)


def test_a_cancelled_chunk_leaves_a_server_that_does_not_answer() -> None:
    app = Misbehaving("slow")
    with engine_with(app, 1, FakeBackend()) as engine:
        asked, waits, after = (chunk(name, Path(), NAME) for name in "abc")
        engine.scheduler.submit([asked, waits])
        until(lambda: app.asked.count("/v1/scores") == 1)
        app.mode = "well"
        engine.scheduler.submit([after])
        engine.cancel(asked.job)
        until(lambda: app.left)
        until(lambda: asked.result.done() and waits.result.done() and after.result.done())
        assert len(after.result.result().rewards[NAME]) == len(waits.result.result().rewards[NAME]) == COUNT
        with pytest.raises(ProblemError):
            asked.result.result()


def test_a_fault_of_the_device_beside_a_server_ends_the_worker(
    server: RewardProcess, backend: Observed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any) -> None:
        raise RuntimeError("no reward's fault")

    def find_broken(_: LocalWorker) -> None:
        raise RuntimeError("the device is lost")

    with engine_beside(server, backend, tmp_path) as engine:
        monkeypatch.setattr(ChunkScorer, "ask_servers", fail)
        monkeypatch.setattr(LocalWorker, "_check_device", find_broken)
        one = chunk("a", tmp_path)
        engine.scheduler.submit([one])
        fault_of(one)
        until(lambda: engine.scheduler.dead)


def test_a_waiting_chunk_that_several_threads_cancel_fails_once() -> None:
    worker = LocalWorker(RolloutSettings(device="cpu"), RolloutMetrics(), FakeBackend().load)
    waits, failed, asked = chunk("a", Path()), list[Chunk](), threading.Event()
    worker._queue = SimpleNamespace(fail=lambda one, error: failed.append(one))  # type: ignore[assignment]

    async def ask_servers(*_: Any) -> None:
        asked.set()
        await asyncio.Event().wait()

    scorer: Any = SimpleNamespace(ask_servers=ask_servers)
    task = background.start(worker._ask_servers(scorer, waits, None))  # type: ignore[arg-type]
    assert asked.wait(600)
    threads = [threading.Thread(target=worker.cancel, args=(waits.job,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    task.result(600)
    for thread in threads:
        thread.join()
    assert failed == [waits]


@pytest.mark.parametrize("away", [False, pytest.param(True, marks=pytest.mark.release)])
def test_a_full_server_holds_up_no_chunk_that_needs_none(away: bool) -> None:
    app = Misbehaving()
    with engine_with(app, 2, None if away else FakeBackend()) as engine:
        app.mode = "slow"
        engine.scheduler.submit([chunk(name, Path(), NAME) for name in "abcdefgh"])
        until(lambda: app.asked.count("/v1/scores") == 2)
        others = [chunk(name, Path(), REWARD) for name in "uvwx"]
        for one in others:
            one.job.run = "other"
            engine.scheduler.submit([one])
        until(lambda: all(one.result.done() for one in others))
        for one in others:
            assert torch.equal(one.result.result().rewards[REWARD], images_of(one).mean((1, 2, 3)))
        assert app.asked.count("/v1/scores") == 2
