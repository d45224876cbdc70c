"""The engine thread: owns the models, takes chunks from the fair queue, and makes and scores their candidates.

Everything that touches torch's model state happens on this one thread. On a GPU a second one scores what is made,
because images come back to the CPU there, and several rewards cut and resize them on it: meanwhile the GPU makes the
next chunk. A fault of a request's own is its answer; a fault of a thread or the device ends the engine, and the
health routes say so.
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial

from solrl_core.errors import RewardError
from solrl_proto.problems import ProblemError, ProblemKind

from solrl_rollout.engine.costs import Costs
from solrl_rollout.engine.executor import Executor, Started, load
from solrl_rollout.engine.fair_queue import FairQueue, QueueFull
from solrl_rollout.engine.scoring_thread import Beside
from solrl_rollout.engine.work import Chunk, Hosted, Job, Scored
from solrl_rollout.http.problems import engine_dead, generation_failed, queue_full
from solrl_rollout.settings import Settings
from solrl_rollout.status.metrics import QueueState, Telemetry
from solrl_rollout.status.throughput import Done, Recent

logger = logging.getLogger(__name__)

_TURN = 4
"""Chunks in a row of one run: what a group of 96 candidates takes."""


class Abandoned(Exception):  # noqa: N818
    """The client left, or the service closes."""


class Engine:
    """Starts and stops the thread, and passes work to it from any other.

    Once `dead`, it makes nothing any more.
    """

    def __init__(self, settings: Settings, telemetry: Telemetry, *, overlap: bool | None = None) -> None:
        """`overlap`: whether a chunk is scored while the next one is made; None for on a GPU only."""
        self._settings = settings
        self._telemetry = telemetry
        self.recent = Recent()
        telemetry.watch_queue(self._waiting)
        self._wake = threading.Condition()
        self.costs = Costs()
        self._queue: FairQueue[Chunk] = FairQueue(
            settings.queue_limit,
            tenant_limit=settings.tenant_queue_limit,
            turn=_TURN,
            weight=lambda chunk: self.costs.of(chunk.kind),
        )
        self._calls: deque[Future[None]] = deque()
        self._running: Job | None = None
        self._overlap = overlap
        self._beside: Beside | None = None
        self._closing = False
        self.dead = False
        self._seconds_per_cost = 0.0
        self._ended = 0.0
        self._thread: threading.Thread | None = None

    def start(self) -> Future[list[Hosted]]:
        """Start the thread; the future holds the models once they are loaded and warm, or why they are not."""
        ready: Future[list[Hosted]] = Future()
        self._thread = threading.Thread(target=self._main, args=(ready,), name="solrl-engine")
        self._thread.start()
        return ready

    def submit(self, chunks: list[Chunk], *, admitted: bool = False) -> None:
        """Queue a request's chunks; `admitted`: what of a pruned request comes again.

        Raises:
            ProblemError: 429 `queue-full`, 503 `engine-dead`.
        """
        with self._wake:
            self._require_alive()
            with self._refusing(sum(chunk.candidates for chunk in chunks)):
                self._queue.put(chunks, admitted=admitted)
            self._wake.notify()

    def require_room(self, tenant: str) -> None:
        """See that at least one candidate more of a tenant's may wait.

        Raises:
            ProblemError: 429 `queue-full`, 503 `engine-dead`.
        """
        with self._wake:
            self._require_alive()
            with self._refusing(None):
                self._queue.require_room({tenant: 1})

    def cancel(self, job: Job) -> None:
        """Drop what waits of a job and stop what runs of it at the next step. Harmless after its end."""
        with self._wake:
            job.cancelled.set()
            dropped = self._queue.drop(lambda chunk: chunk.job is job)
            self._queue.release(job.tenant, job)
        for chunk in dropped:
            chunk.done.cancel()

    def call(self) -> Future[None]:
        """A trivial call; done when the thread gets to it, between two steps at the latest.

        Raises:
            ProblemError: 503 `engine-dead`.
        """
        answered: Future[None] = Future()
        with self._wake:
            self._require_alive()
            self._calls.append(answered)
            self._wake.notify()
        return answered

    def waiting(self, tenant: str) -> tuple[list[Chunk], bool]:
        """What waits of a tenant's, and whether one of its chunks is being made."""
        with self._wake:
            return self._queue.of(tenant), self._running is not None and self._running.tenant == tenant

    def close(self) -> None:
        """Abandon what is left and end the thread."""
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
    def _refusing(self, asked: int | None) -> Iterator[None]:
        """A full queue is the request's answer, and when to come again."""
        try:
            yield
        except QueueFull as full:
            wait = max(1, min(60, math.ceil(self._queue.cost * self._seconds_per_cost)))
            raise queue_full(full, asked, wait) from None

    def _main(self, ready: Future[list[Hosted]]) -> None:
        try:
            executors = load(self._settings, self._telemetry)
        except BaseException as error:
            self._end()
            ready.set_exception(error)
            return
        on_gpu = any(executor.device.type == "cuda" for executor in executors.values())
        if on_gpu if self._overlap is None else self._overlap:
            self._beside = Beside(self._notify)
        ready.set_result([executor.hosted for executor in executors.values()])
        try:
            while (chunk := self._next()) is not None:
                self._start(executors[chunk.job.model], chunk)
        except BaseException:
            logger.exception("the engine thread died; health routes answer 503 from now on")
        finally:
            self._end()

    def _notify(self) -> None:
        with self._wake:
            self._wake.notify()

    def _next(self) -> Chunk | None:
        while True:
            self._answer_calls()
            with self._wake:
                self._running = None
                if self._beside is not None:
                    self._beside.check()
                if self._closing:
                    return None
                chunk = self._queue.take()
                if chunk is not None:
                    self._running = chunk.job
                    return chunk
                if not self._calls:
                    self._wake.wait()

    def _start(self, executor: Executor, chunk: Chunk) -> None:
        if not chunk.done.set_running_or_notify_cancel():
            return

        def between() -> None:
            self._answer_calls()
            self._abandon(chunk)

        started = None
        with self._answering(executor, chunk):
            started = executor.start(chunk, between, self._settle)
            self._settle()
        if started is None:
            return
        if self._beside is None:
            self._finish(executor, chunk, started)
        else:
            self._beside.run(partial(self._finish, executor, chunk, started))

    def _finish(self, executor: Executor, chunk: Chunk, started: Started) -> None:
        with self._answering(executor, chunk):
            self._abandon(chunk)
            scored = executor.finish(started)
            self._measure(chunk, scored)
            chunk.done.set_result(scored)

    def _settle(self) -> bool:
        """Wait for the chunk that is being scored, and answer calls meanwhile; whether there was one."""
        if self._beside is None:
            return False
        busy = not self._beside.idle
        while not self._beside.idle:
            self._answer_calls()
            with self._wake:
                if not self._beside.idle and not self._calls:
                    self._wake.wait()
        self._beside.wait()
        return busy

    def _abandon(self, chunk: Chunk) -> None:
        if chunk.job.cancelled.is_set():
            raise Abandoned

    @contextmanager
    def _answering(self, executor: Executor, chunk: Chunk) -> Iterator[None]:
        """What goes wrong within is the chunk's answer; it is raised, too, if it is the thread's or the device's."""
        try:
            yield
        except ProblemError as error:
            if isinstance(error.__cause__, RewardError):
                self._telemetry.reward_error(error.__cause__.reward)
            chunk.done.set_exception(error)
            if error.problem.kind == ProblemKind.OUT_OF_MEMORY:
                executor.probe()
        except Abandoned:
            # Read only where the service was forced to stop: a client that left reads nothing.
            chunk.done.set_exception(engine_dead())
        except Exception:
            logger.exception("a chunk of run %r of %r failed", chunk.job.run, chunk.tenant)
            chunk.done.set_exception(generation_failed())
            executor.probe()
        except BaseException:
            chunk.done.set_exception(engine_dead())
            raise

    def _measure(self, chunk: Chunk, scored: Scored) -> None:
        now = time.monotonic()
        # What it took beside the chunk before it is not counted twice.
        measured = (now - max(scored.started, self._ended)) / chunk.cost
        self._ended = now
        with self._wake:
            self.costs.measured(chunk.kind, measured)
        known = self._seconds_per_cost or measured
        self._seconds_per_cost = 0.9 * known + 0.1 * measured
        job = chunk.job
        self.recent.add(
            Done(
                tenant=job.tenant,
                candidates=chunk.candidates,
                steps=chunk.steps,
                began=scored.started,
                ended=now,
                generate=scored.generate,
                switched=scored.switched,
            )
        )
        if scored.switched:
            self._telemetry.switched(job.model, job.precision, scored.switch)
        self._telemetry.chunk_done(
            job.tenant,
            job.run,
            job.model,
            job.precision,
            candidates=chunk.candidates,
            steps=chunk.steps,
            generate=scored.generate,
            reward=scored.reward,
        )

    def _waiting(self) -> QueueState:
        with self._wake:
            oldest = min((chunk.queued for chunk in self._queue.heads()), default=None)
            age = 0.0 if oldest is None else time.monotonic() - oldest
            return QueueState(dict(self._queue.by_tenant), age)

    def _answer_calls(self) -> None:
        while self._calls:
            call = self._calls.popleft()
            if call.set_running_or_notify_cancel():
                call.set_result(None)

    def _end(self) -> None:
        if self._beside is not None:
            self._beside.close()
        with self._wake:
            self.dead = True
            left = self._queue.drop(lambda _: True)
            calls, self._calls = self._calls, deque()
        futures: list[Future[Scored] | Future[None]] = [*(chunk.done for chunk in left), *calls]
        for future in futures:
            if future.set_running_or_notify_cancel():
                future.set_exception(engine_dead())
