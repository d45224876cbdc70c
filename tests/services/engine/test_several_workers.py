"""Several workers behind one queue: fair turns, equal models, and chunks that outlive their worker."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_backend import REWARD, SHAPE, FakeBackend, Gate, chunk, job
from solrl_core.sampling.noise import initial_noise
from solrl_engine.backend import GenerationRequest
from solrl_proto.problems import ProblemError
from solrl_rollout.engine.engine import Engine
from solrl_rollout.engine.queue.scheduler import Scheduler
from solrl_rollout.engine.work import Chunk, HostedModel, ScoredChunk
from solrl_rollout.engine.workers.local import LocalWorker
from solrl_rollout.engine.workers.worker import ChunkQueue, WorkerDiedError
from solrl_rollout.settings import RolloutSettings
from solrl_rollout.status.rollout_metrics import RolloutMetrics


class MortalWorker(LocalWorker):
    """Dies of a fault of its backend, and can be loaded again."""

    def __init__(self, settings: RolloutSettings, metrics: RolloutMetrics, backend: FakeBackend, name: str) -> None:
        super().__init__(settings, metrics, backend.load, name=name)
        self.loads = 0

    def load(self) -> list[HostedModel]:
        self.loads += 1
        return super().load()

    def run(self, queue: ChunkQueue) -> None:
        begun: list[Chunk] = []
        serve = self._serve

        def noted(runner: Any, chunk: Chunk) -> None:
            begun[:] = [chunk]
            serve(runner, chunk)

        self._serve = noted  # type: ignore[method-assign]
        try:
            super().run(queue)
        except ConnectionError as error:
            raise WorkerDiedError(str(error), begun) from error
        finally:
            self._serve = serve  # type: ignore[method-assign]


class MortalBackend(FakeBackend):
    """Breaks down on the prompt `fatal`, at most `times` times."""

    def __init__(self, gate: Gate | None = None, times: int = 0) -> None:
        super().__init__()
        self.times, self._gate, self._broken = times, gate, False
        self.on_step = self._step

    def _step(self, request: GenerationRequest) -> None:
        if self._gate is not None:
            self._gate(request)
        self._broken = request.prompt == "fatal" and self.times > 0
        if self._broken:
            self.times -= 1
            raise ConnectionError("the worker is gone")

    def check(self) -> None:
        if self._broken:
            raise ConnectionError("the device is gone")


class Workers(SimpleNamespace):
    engine: Engine
    metrics: RolloutMetrics
    workers: list[MortalWorker]

    def counted(self, name: str) -> float:
        return sum(self.metrics.registry.get_sample_value(name, {"worker": one.name}) or 0.0 for one in self.workers)


@contextmanager
def workers_on(*backends: FakeBackend, **limits: int) -> Iterator[Workers]:
    settings, metrics = RolloutSettings(rewards=(REWARD,), **limits), RolloutMetrics()
    made = [MortalWorker(settings, metrics, backend, f"fake:{i}") for i, backend in enumerate(backends)]
    engine = Engine(settings, metrics, made)
    try:
        engine.start().result(600)
        yield Workers(engine=engine, metrics=metrics, workers=made)
    finally:
        engine.close()


def scores(of: Chunk) -> torch.Tensor:
    return of.result.result(600).rewards[REWARD]


EXPECTED = initial_noise(range(4), SHAPE).mean((1, 2, 3))


def test_a_request_s_chunks_are_spread_over_the_workers() -> None:
    gates = [Gate(), Gate()]
    backends = [MortalBackend(gate) for gate in gates]
    with workers_on(*backends) as one:
        first, second = chunk(job(), "held"), chunk(job(), "held")
        one.engine.scheduler.submit([first, second])
        try:
            assert all(gate.reached.wait(600) for gate in gates)
        finally:
            for gate in gates:
                gate.opened.set()
        assert torch.equal(scores(first), EXPECTED)
        assert torch.equal(scores(second), EXPECTED)
        assert one.counted("solrl_worker_chunks_total") == 2


def test_a_version_is_merged_once_per_worker() -> None:
    backends = [MortalBackend(), MortalBackend()]
    with workers_on(*backends) as one:
        for backend in backends:
            backend.served.clear()
        for version in ("v1", "v2", "v3"):
            adapter: Any = SimpleNamespace(digest=version, adapter=None, hold=None)
            chunks = [chunk(job(adapter=adapter)) for _ in range(12)]
            one.engine.scheduler.submit(chunks)
            for part in chunks:
                scores(part)
    for backend in backends:
        assert len(set(backend.served)) == len(backend.served)
    assert {digest for backend in backends for _, digest in backend.served} == {"v1", "v2", "v3"}


def test_a_chunk_whose_worker_dies_is_made_again() -> None:
    with workers_on(MortalBackend(times=1), MortalBackend()) as one:
        chunks = [chunk(job(), prompt) for prompt in ("a", "fatal", "fatal", "b")]
        one.engine.scheduler.submit(chunks)
        for part in chunks:
            assert torch.equal(scores(part), EXPECTED)
        lost = sum(part.losses for part in chunks)
        while one.counted("solrl_worker_restarts_total") < lost:
            time.sleep(0.01)
        while not all(worker.serving for worker in one.engine.workers):
            time.sleep(0.01)
        assert sum(worker.loads for worker in one.workers) - 2 == lost


def test_a_chunk_that_loses_two_workers_fails_alone() -> None:
    with workers_on(MortalBackend(times=2)) as one:
        chunks = [chunk(job(), prompt) for prompt in ("a", "fatal", "b")]
        one.engine.scheduler.submit(chunks)
        with pytest.raises(ProblemError) as refused:
            scores(chunks[1])
        assert refused.value.problem.detail.startswith("2 workers died")
        for part in (chunks[0], chunks[2]):
            assert torch.equal(scores(part), EXPECTED)
        assert one.counted("solrl_worker_restarts_total") == 2
        assert not one.engine.scheduler.dead


def test_a_worker_that_keeps_dying_is_given_up_and_the_engine_with_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("solrl_rollout.engine.engine._LONGEST_PAUSE", 0.0)
    with workers_on(MortalBackend(times=100)) as one:
        chunks = [chunk(job(), "fatal") for _ in range(4)]
        one.engine.scheduler.submit(chunks)
        kinds = []
        for part in chunks:
            with pytest.raises(ProblemError) as refused:
                scores(part)
            kinds.append(refused.value.problem.kind)
        assert kinds == ["generation-failed"] * 2 + ["engine-dead"] * 2
        assert one.engine.scheduler.dead
        assert one.workers[0].loads == 5


def test_a_lost_chunk_that_was_cancelled_is_not_made_again() -> None:
    gate = Gate("fatal")
    backend = MortalBackend(gate, times=1)
    adapter: Any = SimpleNamespace(digest="v1", adapter=None, hold=None)
    with workers_on(backend) as one:
        lost = chunk(job(adapter=adapter), "fatal")
        one.engine.scheduler.submit([lost])
        assert gate.reached.wait(600)
        one.engine.cancel(lost.job)
        gate.opened.set()
        with pytest.raises(ProblemError):
            scores(lost)
        after = chunk(job())
        one.engine.scheduler.submit([after])
        assert torch.equal(scores(after), EXPECTED)
    assert backend.served.count(("bf16", "v1")) == 1


def test_another_run_waits_for_the_running_chunk_alone_when_a_worker_dies() -> None:
    gates, again = [Gate("fatal"), Gate("fatal")], threading.Event()
    backends = [MortalBackend(gates[0], times=1), MortalBackend(gates[1])]
    order: list[str] = []
    with workers_on(*backends) as one:
        dying = one.workers[0]
        load, step = dying.load, backends[1].on_step

        def held() -> list[HostedModel]:
            assert again.wait(600)
            return load()

        def noted(request: GenerationRequest) -> None:
            order.append(request.prompt)
            step(request)

        dying.load, backends[1].on_step = held, noted  # type: ignore[method-assign]
        big = [chunk(job("big"), "fatal") for _ in range(8)]
        one.engine.scheduler.submit(big)
        try:
            assert all(gate.reached.wait(600) for gate in gates)
            gates[0].opened.set()
            while one.engine.workers[0].serving:
                time.sleep(0.001)
            small = chunk(job("small"), "small")
            one.engine.scheduler.submit([small])
            gates[1].opened.set()
            assert torch.equal(scores(small), EXPECTED)
            assert order[:2] == ["fatal", "small"]
        finally:
            for event in (*(gate.opened for gate in gates), again):
                event.set()
        for part in big:
            assert torch.equal(scores(part), EXPECTED)


@pytest.mark.parametrize(("serving", "seconds"), [(1, 20), (2, 10), (4, 5)])
@pytest.mark.parametrize(("generate", "reward", "asked"), [(4.0, 1.0, 0.0), (1.0, 4.0, 0.0), (3.0, 54.0, 50.0)])
def test_retry_after_counts_the_workers_that_serve_and_no_time_at_reward_servers(
    serving: int, seconds: int, generate: float, reward: float, asked: float
) -> None:
    """The worker takes 4 seconds for 4 candidates."""
    scheduler = Scheduler(RolloutSettings(rewards=(REWARD,), queue_limit=20), RolloutMetrics())
    scheduler.serving = serving
    scored = ScoredChunk({}, None, None, 0, 0.0, False, 9.0, generate, reward, asked)
    scheduler.record("fake:0", chunk(job()), scored)
    scheduler.submit([chunk(job(), count=20)])
    with pytest.raises(ProblemError) as refused:
        scheduler.submit([chunk(job())])
    assert refused.value.retry_after == seconds


def test_workers_with_different_models_do_not_start() -> None:
    other = MortalBackend()
    other.identity = replace(other.identity, digests={"transformer": f"sha256:{7:064x}"})
    expected = r"worker fake:\d and worker fake:\d loaded mini-sana differently, in digest of transformer: "
    with pytest.raises(RuntimeError, match=expected), workers_on(MortalBackend(), other):
        pass
