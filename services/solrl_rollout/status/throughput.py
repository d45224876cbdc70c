"""Throughput of the last minute, by tenant."""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from solrl_proto.status import Throughput

WINDOW = 60.0
"""Seconds of history."""
PARTS = 12
"""Number of intervals in a tenant's history."""


@dataclass(frozen=True)
class FinishedChunk:
    """A scored chunk: what it was made of, when it started and ended, and the seconds of each phase."""

    tenant: str
    run: str | None
    model: str
    precision: str
    candidates: int
    steps: int
    started_at: float
    ended_at: float
    switched: bool
    """Whether another adapter was served before."""
    switch: float
    generate: float
    reward: float


class RecentThroughput:
    """The chunks finished in the last minute. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start = clock()
        self._lock = threading.Lock()
        self._chunks: deque[FinishedChunk] = deque()

    def add(self, chunk: FinishedChunk) -> None:
        with self._lock:
            self._chunks.append(chunk)
            self._forget(chunk.ended_at)

    def of_tenant(self, tenant: str, *, busy: bool = False) -> Throughput:
        """A tenant's throughput; `busy`: one of its chunks is running."""
        now = self._clock()
        with self._lock:
            self._forget(now)
            chunks = [chunk for chunk in self._chunks if chunk.tenant == tenant]
        if busy and chunks:
            # A running chunk counts only once it is finished; until then the window ends before it.
            now = max(chunk.ended_at for chunk in chunks)
        # A chunk is spread over the time it took; otherwise a slow one would be a peak at its end.
        part = WINDOW / PARTS
        edges = [now - WINDOW + i * part for i in range(PARTS)]
        parts = [sum(_candidates_between(chunk, edge, edge + part) for chunk in chunks) for edge in edges]
        window = max(1.0, min(WINDOW, now - self._start))
        steps = sum(chunk.steps for chunk in chunks)
        return Throughput(
            window=round(window, 1),
            candidates_per_second=round(sum(parts) / window, 3),
            switches=sum(chunk.switched for chunk in chunks),
            step_seconds=round(sum(chunk.generate for chunk in chunks) / steps, 5) if steps else None,
            history=tuple(round(candidates / part, 2) for candidates in parts),
        )

    def _forget(self, now: float) -> None:
        while self._chunks and self._chunks[0].ended_at < now - WINDOW:
            self._chunks.popleft()


def _candidates_between(chunk: FinishedChunk, start: float, end: float) -> float:
    length = max(chunk.ended_at - chunk.started_at, 1e-6)
    return chunk.candidates * max(0.0, min(chunk.ended_at, end) - max(chunk.started_at, start)) / length
