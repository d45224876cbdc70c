"""A worker in this process: the runners of all hosted models, called from one thread.

If a backend leaves the CPU free, a second thread scores one chunk while the next is generated. Chunks whose images have
left the device wait for reward servers on the background loop.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from solrl_client import background
from solrl_core.errors import RewardError
from solrl_engine.side_stream import SideStream

from solrl_rollout.engine.backends import BackendLoader
from solrl_rollout.engine.chunk_scorer import ChunkScorer
from solrl_rollout.engine.errors import ChunkFailedError, EngineDeadError, chunk_error
from solrl_rollout.engine.model_loading import load_models
from solrl_rollout.engine.model_runner import ModelRunner
from solrl_rollout.engine.work import Chunk, GeneratedChunk, HostedModel, Job, ScoredChunk
from solrl_rollout.engine.workers.worker import ChunkQueue
from solrl_rollout.settings import RolloutSettings
from solrl_rollout.status.rollout_metrics import RolloutMetrics

logger = logging.getLogger(__name__)


class Cancelled(Exception):  # noqa: N818
    """The client disconnected, or the service is closing."""


class LocalWorker:
    """Generates in the thread that calls `run`. A fault of the device or of a thread ends it for good."""

    def __init__(
        self,
        settings: RolloutSettings,
        metrics: RolloutMetrics,
        load_backend: BackendLoader,
        *,
        name: str | None = None,
        lock: str | None = None,
    ) -> None:
        """`name`: of the worker in logs and metrics, by default its device's; `lock`: see `load_models`."""
        self.name = name or settings.torch_device
        self._settings = settings
        self._metrics = metrics
        self._load_backend = load_backend
        self._lock = lock
        self._runners: dict[str, ModelRunner] = {}
        self._scoring: SideStream
        self._places = asyncio.Semaphore(settings.scoring_in_flight)
        """Limits chunks waiting for the operator's reward servers; the scheduler limits external ones."""
        self._asking: set[Future[None]] = set()
        """What waits for servers, and what a fault has ended."""
        self._cancellable: dict[Chunk, asyncio.Task[Any]] = {}
        """Belongs to the background loop."""
        self._pings: deque[Future[None]] = deque()
        self._queue: ChunkQueue
        self._wake: Callable[[], None] = lambda: None

    def load(self) -> list[HostedModel]:
        self._runners = load_models(self._settings, self._metrics, self._load_backend, self._lock)
        return [runner.hosted for runner in self._runners.values()]

    def run(self, queue: ChunkQueue) -> None:
        """Generate and score chunks until the engine closes; all that were begun are scored before this returns."""
        self._queue, self._wake = queue, queue.wake
        self._scoring = SideStream(
            torch.device(self._settings.torch_device),
            overlaps=any(runner.backend.capabilities.overlaps for runner in self._runners.values()),
            on_end=queue.wake,
        )
        try:
            while (chunk := queue.wait_for_chunk(self._on_wake)) is not None:
                self._serve(self._runners[chunk.job.model], chunk)
        finally:
            self._scoring.close()
            wait(tuple(self._asking))

    def cancel(self, job: Job) -> None:
        """End the waits of the job's chunks for servers; for other chunks, `cancelled` of the job is enough."""
        background.loop().call_soon_threadsafe(self._stop_asking, job)

    def _stop_asking(self, job: Job) -> None:
        for chunk, task in self._cancellable.items():
            if chunk.job is job:
                task.cancel()

    def ping(self) -> Future[None]:
        ping: Future[None] = Future()
        self._pings.append(ping)
        self._wake()  # before `run`, nothing sleeps
        return ping

    def kill(self) -> None:
        """Nothing: a thread cannot be ended."""

    def close(self) -> None:
        self._answer_pings(EngineDeadError())
        for runner in self._runners.values():
            runner.backend.close()

    def _on_wake(self) -> None:
        self._answer_pings()
        for task in tuple(self._asking):
            if task.done():
                task.result()
        self._scoring.check()

    def _serve(self, runner: ModelRunner, chunk: Chunk) -> None:
        """Generate a chunk, then score it here or on the scoring thread."""

        def between_steps() -> None:
            self._answer_pings()
            _stop_if_cancelled(chunk)

        ready = None
        with self._reporting_errors(chunk, runner.backend.check):
            _stop_if_cancelled(chunk)
            generated = runner.generate(chunk, between_steps, self._wait_for_scoring)
            self._wait_for_scoring()
            ready = generated
        if ready is not None:
            self._scoring.start(partial(self._score, runner.scorer, ready))

    def _score(self, scorer: ChunkScorer, generated: GeneratedChunk) -> None:
        """Compute a chunk's rewards here, and begin to ask servers for the other rewards."""
        chunk = generated.chunk
        with self._reporting_errors(chunk, self._check_device):
            _stop_if_cancelled(chunk)
            scored = scorer.score_here(generated)
            if scorer.asks_servers(chunk.job):
                task = background.start(self._ask_servers(scorer, chunk, scored))
                self._asking.add(task)
                task.add_done_callback(self._end_asking)
            else:
                self._queue.finish(chunk, scored)

    async def _ask_servers(self, scorer: ChunkScorer, chunk: Chunk, scored: ScoredChunk) -> None:
        with self._reporting_errors(chunk, self._check_device):
            _stop_if_cancelled(chunk)
            task = asyncio.current_task()
            assert task is not None
            self._cancellable[chunk] = task
            try:
                async with nullcontext() if chunk.job.external_rewards else self._places:
                    scored = await scorer.ask_servers(chunk, scored)
            finally:
                del self._cancellable[chunk]
            self._queue.finish(chunk, scored)

    def _end_asking(self, task: Future[None]) -> None:
        if task.exception() is None:
            self._asking.discard(task)
        self._wake()

    def _check_device(self) -> None:
        torch.ones(1, device=self._settings.torch_device).sum().item()

    def _wait_for_scoring(self) -> bool:
        """Wait for the chunk being scored here, and answer pings; returns whether there was one."""
        scoring = self._scoring
        busy = not scoring.idle
        self._queue.wait(lambda: scoring.idle, self._answer_pings)
        scoring.check()
        return busy

    @contextmanager
    def _reporting_errors(self, chunk: Chunk, check: Callable[[], None]) -> Iterator[None]:
        """Fail the chunk with an error raised within the block, unless it is a fault of the device or of the thread.

        Such a fault is raised, and the chunk stays unresolved. `check` raises if the device no longer works.
        """
        try:
            yield
        except (Cancelled, asyncio.CancelledError):
            # Only seen if the service was forced to stop; a client that disconnected reads nothing.
            self._queue.fail(chunk, EngineDeadError())
        except Exception as error:
            job, problem = chunk.job, chunk_error(chunk, error)
            if isinstance(error, RewardError) and not (error.reward in job.external_rewards or job.cancelled.is_set()):
                self._metrics.reward_failed(error.reward)
            unknown = isinstance(problem, ChunkFailedError)
            if unknown:
                logger.exception("a chunk of run %r of %r failed", job.run, job.tenant)
            if unknown or isinstance(error, torch.OutOfMemoryError):
                check()
            self._queue.fail(chunk, problem)

    def _answer_pings(self, error: Exception | None = None) -> None:
        while self._pings:
            ping = self._pings.popleft()
            if ping.set_running_or_notify_cancel():
                ping.set_exception(error) if error else ping.set_result(None)


def _stop_if_cancelled(chunk: Chunk) -> None:
    if chunk.job.cancelled.is_set():
        raise Cancelled
