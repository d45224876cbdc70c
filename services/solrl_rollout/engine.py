"""The engine thread: owns the models, takes chunks from the fair queue, and makes and scores their candidates.

Everything that touches torch's model state happens on this one thread. A fault of a request's own is its
answer; a fault of the thread or the device ends the engine, and the health routes say so.
"""

import logging
import math
import threading
import time
from collections import deque
from concurrent.futures import Future

from solrl_core.rewards.base import RewardError
from solrl_proto.problems import ProblemError

from solrl_rollout.executor import Executor, load
from solrl_rollout.problems import engine_dead, generation_failed, queue_full
from solrl_rollout.queue import FairQueue, QueueFull
from solrl_rollout.recent import Done, Recent
from solrl_rollout.settings import Settings
from solrl_rollout.telemetry import QueueState, Telemetry
from solrl_rollout.work import Chunk, Hosted, Job, Scored

logger = logging.getLogger(__name__)

_TURN = 4
"""Chunks in a row of one run: what a group of 96 candidates takes."""


class Abandoned(Exception):  # noqa: N818
    """The client left, or the service closes."""


class Engine:
    """Starts and stops the thread, and passes work to it from any other.

    Once `dead`, it makes nothing any more.
    """

    def __init__(self, settings: Settings, telemetry: Telemetry) -> None:
        self._settings = settings
        self._telemetry = telemetry
        self.recent = Recent()
        telemetry.watch_queue(self._waiting)
        self._wake = threading.Condition()
        self._queue: FairQueue[Chunk] = FairQueue(
            settings.queue_limit, tenant_limit=settings.tenant_queue_limit, turn=_TURN
        )
        self._calls: deque[Future[None]] = deque()
        self._running: Job | None = None
        self._closing = False
        self.dead = False
        self._seconds_per_cost = 0.0
        self._thread: threading.Thread | None = None

    def start(self) -> Future[list[Hosted]]:
        """Start the thread; the future holds the models once they are loaded and warm, or why they are not."""
        ready: Future[list[Hosted]] = Future()
        self._thread = threading.Thread(target=self._main, args=(ready,), name="solrl-engine")
        self._thread.start()
        return ready

    def submit(self, chunks: list[Chunk], *, admitted: bool = False) -> None:
        """Queue a request's chunks; `admitted`: of a request that was let in before.

        Raises:
            ProblemError: 429 `queue-full`, 503 `engine-dead`.
        """
        with self._wake:
            self._require_alive()
            try:
                self._queue.put(chunks, admitted=admitted)
            except QueueFull as full:
                asked = sum(chunk.candidates for chunk in chunks)
                wait = max(1, min(60, math.ceil(self._queue.cost * self._seconds_per_cost)))
                raise queue_full(full, asked, wait) from None
            self._wake.notify()

    def cancel(self, job: Job) -> None:
        """Drop what waits of a job and stop what runs of it at the next step. Harmless after its end."""
        with self._wake:
            job.cancelled.set()
            dropped = self._queue.drop(lambda chunk: chunk.job is job)
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

    def _main(self, ready: Future[list[Hosted]]) -> None:
        try:
            executors = load(self._settings)
        except BaseException as error:
            self._end()
            ready.set_exception(error)
            return
        ready.set_result([executor.hosted for executor in executors.values()])
        try:
            while (chunk := self._next()) is not None:
                self._execute(executors[chunk.job.model], chunk)
        except BaseException:
            logger.exception("the engine thread died; health routes answer 503 from now on")
        finally:
            self._end()

    def _next(self) -> Chunk | None:
        while True:
            self._answer_calls()
            with self._wake:
                self._running = None
                if self._closing:
                    return None
                chunk = self._queue.take()
                if chunk is not None:
                    self._running = chunk.job
                    return chunk
                if not self._calls:
                    self._wake.wait()

    def _execute(self, executor: Executor, chunk: Chunk) -> None:
        if not chunk.done.set_running_or_notify_cancel():
            return

        def between() -> None:
            self._answer_calls()
            if chunk.job.cancelled.is_set():
                raise Abandoned

        try:
            scored = executor.execute(chunk, between)
        except ProblemError as error:
            if isinstance(error.__cause__, RewardError):
                self._telemetry.reward_error(error.__cause__.reward)
            chunk.done.set_exception(error)
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
        else:
            self._measure(chunk, scored)
            chunk.done.set_result(scored)

    def _measure(self, chunk: Chunk, scored: Scored) -> None:
        measured = (scored.switch + scored.generate + scored.reward) / chunk.cost
        known = self._seconds_per_cost or measured
        self._seconds_per_cost = 0.9 * known + 0.1 * measured
        job = chunk.job
        self.recent.add(
            Done(
                tenant=job.tenant,
                candidates=chunk.candidates,
                steps=chunk.steps,
                began=scored.started,
                ended=time.monotonic(),
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
        with self._wake:
            self.dead = True
            left = self._queue.drop(lambda _: True)
            calls, self._calls = self._calls, deque()
        futures: list[Future[Scored] | Future[None]] = [*(chunk.done for chunk in left), *calls]
        for future in futures:
            if future.set_running_or_notify_cancel():
                future.set_exception(engine_dead())
