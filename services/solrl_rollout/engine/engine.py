"""The engine thread, which takes chunks from the fair queue, generates and scores them, and resolves their results.

All calls to the backends come from this one thread. If a backend leaves the CPU free, a second thread scores one chunk
while the next is generated. A request that fails by its own fault gets an error; a fault of a thread or a device ends
the engine, and the health routes report it.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial

from solrl_core.errors import RewardError
from solrl_proto.problems import ProblemError, ProblemKind

from solrl_rollout.engine.backends import load_backend
from solrl_rollout.engine.backends.base import BackendLoader
from solrl_rollout.engine.costs import StepCosts
from solrl_rollout.engine.fair_queue import FairQueue, QueueFull
from solrl_rollout.engine.model_runner import ModelRunner, load_models
from solrl_rollout.engine.problems import engine_dead, generation_failed, queue_full
from solrl_rollout.engine.scoring_thread import ScoringThread
from solrl_rollout.engine.work import Chunk, GeneratedChunk, HostedModel, Job, ScoredChunk
from solrl_rollout.settings import Settings
from solrl_rollout.status.metrics import Metrics, QueueState
from solrl_rollout.status.throughput import FinishedChunk, RecentThroughput

logger = logging.getLogger(__name__)

_TURN = 4
"""Consecutive chunks of one run: a group of 96 candidates."""


class Cancelled(Exception):  # noqa: N818
    """The client disconnected, or the service is closing."""


class Engine:
    """Owns the engine thread. Other threads submit work here; once it is `dead`, submitting fails."""

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        *,
        load_backend: BackendLoader = load_backend,
        overlap: bool | None = None,
    ) -> None:
        """Prepare the thread.

        Args:
            settings: models, rewards and limits.
            metrics: metrics to update.
            load_backend: loads each model's backend, in the engine thread.
            overlap: score a chunk while the next is generated; None if the backends support it.
        """
        self._settings = settings
        self._metrics = metrics
        self._load_backend = load_backend
        self._overlap = overlap
        self.throughput = RecentThroughput()
        metrics.watch_queue(self._queue_state)
        self._wake = threading.Condition()
        self._costs = StepCosts()
        self._queue: FairQueue[Chunk] = FairQueue(
            settings.queue_limit,
            tenant_limit=settings.tenant_queue_limit,
            turn=_TURN,
            weight=lambda chunk: self._costs.weight(chunk.kind),
        )
        self._pings: deque[Future[None]] = deque()
        self._running: Job | None = None
        self._scoring: ScoringThread | None = None
        self._closing = False
        self.dead = False
        self._seconds_per_cost = 0.0
        self._last_end = 0.0
        self._thread: threading.Thread | None = None

    def start(self) -> Future[list[HostedModel]]:
        """Start the thread. The future resolves with the models once they are warm, or with the error of loading."""
        ready: Future[list[HostedModel]] = Future()
        ready.set_running_or_notify_cancel()  # the caller may stop waiting, but loading continues
        self._thread = threading.Thread(target=self._run, args=(ready,), name="solrl-engine")
        self._thread.start()
        return ready

    def submit(self, chunks: list[Chunk], *, reserved: bool = False) -> None:
        """Queue chunks.

        Args:
            chunks: in the order in which they are to run.
            reserved: they are survivors of pruning, for which the queue has reserved capacity.

        Raises:
            ProblemError: 429 `queue-full`, 503 `engine-dead`.
        """
        with self._wake:
            self._require_alive()
            with self._refuse_when_full(sum(chunk.candidates for chunk in chunks)):
                self._queue.put(chunks, reserved=reserved)
            self._wake.notify()

    def require_capacity(self, tenant: str) -> None:
        """Check that the queue has room for at least one more candidate of a tenant.

        Raises:
            ProblemError: 429 `queue-full`, 503 `engine-dead`.
        """
        with self._wake:
            self._require_alive()
            with self._refuse_when_full(None):
                self._queue.require_capacity({tenant: 1})

    def cancel(self, job: Job) -> None:
        """Remove a job's waiting chunks and stop its running one at the next step. Harmless after its end."""
        with self._wake:
            job.cancelled.set()
            removed = self._queue.remove(lambda chunk: chunk.job is job)
            self._queue.release(job.tenant, job)
        for chunk in removed:
            chunk.result.cancel()

    def ping(self) -> Future[None]:
        """Return a future that the thread resolves before its next step.

        Raises:
            ProblemError: 503 `engine-dead`.
        """
        ping: Future[None] = Future()
        with self._wake:
            self._require_alive()
            self._pings.append(ping)
            self._wake.notify()
        return ping

    def waiting(self, tenant: str) -> tuple[list[Chunk], bool]:
        """A tenant's waiting chunks, and whether one of its chunks is running."""
        with self._wake:
            return self._queue.of_tenant(tenant), self._running is not None and self._running.tenant == tenant

    def close(self) -> None:
        """Cancel unfinished work and end the thread."""
        with self._wake:
            self._closing = True
            if self._running is not None:
                self._running.cancelled.set()
            self._wake.notify()
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join()

    def _require_alive(self) -> None:
        if self.dead or self._closing:
            raise engine_dead()

    @contextmanager
    def _refuse_when_full(self, requested: int | None) -> Iterator[None]:
        """Turn QueueFull into a 429 with an estimate for Retry-After."""
        try:
            yield
        except QueueFull as full:
            wait = max(1, min(60, math.ceil(self._queue.cost * self._seconds_per_cost)))
            raise queue_full(full.waiting, full.limit, full.tenant, requested=requested, retry_after=wait) from None

    def _run(self, ready: Future[list[HostedModel]]) -> None:
        """The thread's main function."""
        try:
            runners = load_models(self._settings, self._metrics, self._load_backend)
        except BaseException as error:
            self._end()
            ready.set_exception(error)
            return
        overlaps = any(runner.backend.capabilities.overlaps for runner in runners.values())
        if overlaps if self._overlap is None else self._overlap:
            self._scoring = ScoringThread(self._notify)
        ready.set_result([runner.hosted for runner in runners.values()])
        try:
            while (chunk := self._next_chunk()) is not None:
                self._process(runners[chunk.job.model], chunk)
        except BaseException:
            logger.exception("the engine thread died; health routes answer 503 from now on")
        finally:
            self._end()
            for runner in runners.values():
                runner.backend.close()

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify()

    def _next_chunk(self) -> Chunk | None:
        """Wait for the next chunk; None once the engine closes."""
        while True:
            self._answer_pings()
            with self._wake:
                self._running = None
                if self._scoring is not None:
                    self._scoring.check()
                if self._closing:
                    return None
                chunk = self._queue.take()
                if chunk is not None:
                    self._running = chunk.job
                    return chunk
                if not self._pings:
                    self._wake.wait()

    def _process(self, runner: ModelRunner, chunk: Chunk) -> None:
        """Generate a chunk, then score it here or on the scoring thread."""
        if not chunk.result.set_running_or_notify_cancel():
            return

        def between_steps() -> None:
            self._answer_pings()
            self._stop_if_cancelled(chunk)

        generated = None
        with self._resolving_errors(chunk, runner.backend.check):
            generated = runner.generate(chunk, between_steps, self._wait_for_scoring)
            self._wait_for_scoring()
        if generated is None:
            return
        if self._scoring is None:
            self._score(runner, generated)
        else:
            self._scoring.run(partial(self._score, runner, generated))

    def _score(self, runner: ModelRunner, generated: GeneratedChunk) -> None:
        chunk = generated.chunk
        with self._resolving_errors(chunk, runner.scorer.check):
            self._stop_if_cancelled(chunk)
            scored = runner.scorer.score(generated)
            self._record(chunk, scored)
            chunk.result.set_result(scored)

    def _wait_for_scoring(self) -> bool:
        """Wait for the chunk being scored, and answer pings; returns whether there was one."""
        if self._scoring is None:
            return False
        busy = not self._scoring.idle
        while not self._scoring.idle:
            self._answer_pings()
            with self._wake:
                if not self._scoring.idle and not self._pings:
                    self._wake.wait()
        self._scoring.wait()
        return busy

    def _stop_if_cancelled(self, chunk: Chunk) -> None:
        if chunk.job.cancelled.is_set():
            raise Cancelled

    @contextmanager
    def _resolving_errors(self, chunk: Chunk, check: Callable[[], None]) -> Iterator[None]:
        """Resolve the chunk's result with any error raised within the block. Faults of the thread are raised, too.

        `check` raises if the device no longer works.
        """
        try:
            yield
        except ProblemError as error:
            if isinstance(error.__cause__, RewardError):
                self._metrics.reward_failed(error.__cause__.reward)
            chunk.result.set_exception(error)
            if error.problem.kind == ProblemKind.OUT_OF_MEMORY:
                check()
        except Cancelled:
            # Only seen if the service was forced to stop; a client that disconnected reads nothing.
            chunk.result.set_exception(engine_dead())
        except Exception:
            logger.exception("a chunk of run %r of %r failed", chunk.job.run, chunk.tenant)
            chunk.result.set_exception(generation_failed())
            check()
        except BaseException:
            chunk.result.set_exception(engine_dead())
            raise

    def _record(self, chunk: Chunk, scored: ScoredChunk) -> None:
        """Account for a finished chunk in the queue's shares, the status page and metrics."""
        now, job = time.monotonic(), chunk.job
        # Excludes the time of overlap with the previous chunk. Merging the adapter is billed to its run, rather than
        # to all work of this kind.
        whole = now - max(scored.started_at, self._last_end)
        seconds = max(0.0, whole - scored.switch) / chunk.cost
        self._last_end = now
        with self._wake:
            self._costs.record(chunk.kind, seconds)
            self._queue.charge(chunk, self._costs.cost_of(scored.switch))
        self._seconds_per_cost = 0.9 * (self._seconds_per_cost or seconds) + 0.1 * seconds
        self.throughput.add(
            FinishedChunk(
                tenant=job.tenant,
                candidates=chunk.candidates,
                steps=chunk.steps,
                started_at=scored.started_at,
                ended_at=now,
                generate=scored.generate,
                switched=scored.switched,
            )
        )
        if scored.switched:
            self._metrics.adapter_switched(job.model, job.precision, scored.switch)
        self._metrics.chunk_finished(
            job.tenant,
            job.run,
            job.model,
            job.precision,
            candidates=chunk.candidates,
            steps=chunk.steps,
            generate=scored.generate,
            reward=scored.reward,
        )

    def _queue_state(self) -> QueueState:
        with self._wake:
            oldest = min((chunk.queued_at for chunk in self._queue.heads()), default=None)
            age = 0.0 if oldest is None else time.monotonic() - oldest
            return QueueState(dict(self._queue.by_tenant), age)

    def _answer_pings(self) -> None:
        while self._pings:
            ping = self._pings.popleft()
            if ping.set_running_or_notify_cancel():
                ping.set_result(None)

    def _end(self) -> None:
        """Resolve all remaining futures with `engine-dead`."""
        if self._scoring is not None:
            self._scoring.close()
        with self._wake:
            self.dead = True
            left = self._queue.remove(lambda _: True)
            pings, self._pings = self._pings, deque()
        futures: list[Future[ScoredChunk] | Future[None]] = [*(chunk.result for chunk in left), *pings]
        for future in futures:
            if future.set_running_or_notify_cancel():
                future.set_exception(engine_dead())
