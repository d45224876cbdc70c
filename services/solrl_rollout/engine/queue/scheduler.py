"""Chunks between requests and workers: the fair queue under one lock, and the accounts of finished chunks."""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager

from solrl_proto.problems import ProblemError, ProblemKind

from solrl_rollout.engine.errors import ChunkFailedError, EngineDeadError
from solrl_rollout.engine.queue.fair_queue import FairQueue, Quantum, QueueFullError
from solrl_rollout.engine.work import Chunk, Job, ScoredChunk
from solrl_rollout.settings import RolloutSettings
from solrl_rollout.status.rollout_metrics import QueueState, RolloutMetrics
from solrl_rollout.status.throughput import FinishedChunk, RecentThroughput

_TURN = 4
"""Consecutive chunks of one run on a worker: a group of 96 candidates."""
BUILTIN_SERVERS = ""
"""All reward servers of the settings, which share one limit."""
_MOST_LOSSES = 1
"""Times that a chunk is made again because its worker died."""
_NEWEST_WEIGHT = 0.1
"""Weight of the newest measurement in the running mean."""


class StepCosts:
    """Seconds per step and candidate of each kind of work, relative to the kind measured first. Not thread-safe.

    Without it, a large model would take most of the time in equal turns.
    """

    def __init__(self) -> None:
        self._started: set[Hashable] = set()
        self._seconds: dict[Hashable, float] = {}

    def weight(self, kind: Hashable) -> float:
        """The relative cost of a kind; 1 until it is measured."""
        first = next(iter(self._seconds.values()), 1.0)
        return self._seconds.get(kind, first) / first

    def cost_of(self, seconds: float) -> float:
        """The number of candidate-steps, of the kind measured first, that take `seconds`; 0 until it is measured."""
        first = next(iter(self._seconds.values()), 0.0)
        return seconds / first if first else 0.0

    def record(self, kind: Hashable, seconds: float) -> None:
        """Add a measurement. The first of each kind is ignored, because it may include compilation."""
        if kind not in self._started:
            self._started.add(kind)
            return
        mean = self._seconds.get(kind, seconds)
        self._seconds[kind] = (1 - _NEWEST_WEIGHT) * mean + _NEWEST_WEIGHT * seconds


class Scheduler:
    """Thread-safe, except where a docstring demands that the caller holds `changed`.

    Attributes:
        changed: the lock of all waiting work; notified when work arrives, and when the scheduler closes.
        serving: number of workers that serve.
        closing: no more chunks are given out.
        dead: no worker will serve again.
        finished: number of chunks that all workers have finished.
        throughput: throughput in the last minute.
    """

    def __init__(self, settings: RolloutSettings, metrics: RolloutMetrics) -> None:
        self.changed = threading.Condition()
        self.serving = 0
        self.closing = False
        self.dead = False
        self.finished = 0
        self.throughput = RecentThroughput()
        self._metrics = metrics
        self._at_servers = settings.scoring_in_flight
        self._costs = StepCosts()
        self._queue = FairQueue(
            settings.queue_limit,
            tenant_limit=settings.tenant_queue_limit,
            turn=_TURN,
            weight=lambda chunk: self._costs.weight(chunk.kind),
        )
        self._seconds_per_cost = 0.0
        metrics.watch_queue(self._state)

    def submit(self, chunks: list[Chunk]) -> None:
        """Queue chunks, in the order that they are to run in.

        Raises:
            ProblemError: 429 `queue-full`, 503 `engine-dead`.
        """
        with self.changed:
            self.require_alive()
            with self._refuse_when_full(sum(chunk.candidates for chunk in chunks)):
                self._queue.put(chunks)
            self.changed.notify_all()

    def require_alive(self) -> None:
        """Raise EngineDeadError once the engine accepts no work."""
        if self.dead or self.closing:
            raise EngineDeadError

    def require_capacity(self, tenant: str) -> None:
        """Check that the queue has room for at least one more candidate of a tenant.

        Raises:
            ProblemError: 429 `queue-full`, 503 `engine-dead`.
        """
        with self.changed:
            self.require_alive()
            with self._refuse_when_full(None):
                self._queue.require_capacity({tenant: 1})

    def next_chunk(
        self, turn: Quantum, begun: Sequence[Chunk], servers: Callable[[Chunk], Collection[str]]
    ) -> Chunk | None:
        """The next chunk of a worker, or None. The caller holds `changed`.

        A run waits while one of its reward servers has the worker's maximum of chunks. So a slow server delays only the
        runs that need it.

        Args:
            turn: the worker's turn.
            begun: chunks that it has taken and not finished.
            servers: the reward servers that a chunk needs; `BUILTIN_SERVERS` stands for all servers of the settings.
        """
        busy = Counter(at for chunk in begun for at in servers(chunk))
        # One more chunk is generated while the servers of the settings score their maximum.
        full = {at for at, chunks in busy.items() if chunks >= self._at_servers + (at == BUILTIN_SERVERS)}
        skip = (lambda chunk: not full.isdisjoint(servers(chunk))) if full else None
        while (chunk := self._queue.pop(turn, skip)) is not None:
            # A chunk that was put back is running already.
            if chunk.result.running() or chunk.result.set_running_or_notify_cancel():
                return chunk
        return None

    def put_back(self, chunks: list[Chunk]) -> None:
        """Queue taken chunks again, which their worker will not finish, at the front of their runs.

        A chunk that has been lost too often, or that nobody waits for, is resolved with its error instead.
        """
        resolved: list[tuple[Chunk, Exception]] = []
        with self.changed:
            for chunk in reversed(chunks):
                if self.closing or self.dead or chunk.job.cancelled.is_set():
                    resolved.append((chunk, EngineDeadError()))
                elif chunk.losses > _MOST_LOSSES:
                    fault = f"{chunk.losses} workers died while generating the same candidates"
                    resolved.append((chunk, ChunkFailedError(f"{fault}, which are not tried again")))
                else:
                    self._queue.put_back(chunk)
            self.changed.notify_all()
        for chunk, error in resolved:
            chunk.result.set_exception(error)

    def cancel(self, job: Job) -> None:
        """Set a job's `cancelled`, and remove its waiting chunks."""
        with self.changed:
            job.cancelled.set()
            removed = self._queue.remove(job)
        for chunk in removed:
            if not chunk.result.cancel():  # it was put back
                chunk.result.set_exception(EngineDeadError())

    def clear(self) -> list[Chunk]:
        with self.changed:
            return self._queue.clear()

    def waiting(self, tenant: str) -> list[Chunk]:
        with self.changed:
            return self._queue.of_tenant(tenant)

    def record(self, worker: str, chunk: Chunk, scored: ScoredChunk) -> None:
        """Account for a chunk that a worker has finished in the queue's shares, the status page and metrics."""
        job = chunk.job
        # The longer of the two, since the worker generates the next chunk while it scores this one, or a server does.
        # Merging the adapter is billed to its run, rather than to all work of this kind.
        seconds = max(scored.generate, scored.reward - scored.server_seconds) / chunk.cost
        with self.changed:
            self.finished += 1
            self._costs.record(chunk.kind, seconds)
            self._queue.charge(chunk, self._costs.cost_of(scored.switch))
            self._seconds_per_cost = 0.9 * (self._seconds_per_cost or seconds) + 0.1 * seconds
        finished = FinishedChunk(
            tenant=job.tenant,
            run=job.run,
            model=job.model,
            precision=job.precision,
            candidates=chunk.candidates,
            steps=chunk.steps,
            started_at=scored.started_at,
            ended_at=time.monotonic(),
            switched=scored.switched,
            switch=scored.switch,
            generate=scored.generate,
            reward=scored.reward,
        )
        self.throughput.add(finished)
        self._metrics.chunk_finished(worker, finished)

    @contextmanager
    def _refuse_when_full(self, requested: int | None) -> Iterator[None]:
        """Raise QueueFullError as a problem, with an estimate of the time until there is capacity."""
        try:
            yield
        except QueueFullError as full:
            seconds = self._queue.cost * self._seconds_per_cost / max(1, self.serving)
            free = max(0, full.limit - full.waiting)
            whose = "there are" if full.tenant is None else f"tenant {full.tenant!r} has"
            raise ProblemError(
                ProblemKind.QUEUE_FULL,
                f"{whose} {full.waiting} candidates waiting already and the limit is {full.limit}",
                retry_after=max(1, min(60, math.ceil(seconds))),
                got=requested,
                expected=f"at most {free} more candidates now",
                action="send the same request again later"
                + (", or request fewer candidates at a time" if free else ""),
            ) from None

    def _state(self) -> QueueState:
        with self.changed:
            oldest = min((chunk.queued_at for chunk in self._queue.heads()), default=None)
            age = 0.0 if oldest is None else time.monotonic() - oldest
            return QueueState(dict(self._queue.by_tenant), age)
