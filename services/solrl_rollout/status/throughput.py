"""What the engine made in the last minute, by tenant."""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from solrl_proto.status import Throughput

WINDOW = 60.0
PARTS = 12


@dataclass(frozen=True)
class Done:
    """A finished chunk: whose, how many candidates in how many steps, when, and the seconds of making them."""

    tenant: str
    candidates: int
    steps: int
    began: float
    ended: float
    generate: float
    switched: bool


class Recent:
    """Remembers chunks for a minute. To be used from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start = clock()
        self._lock = threading.Lock()
        self._done: deque[Done] = deque()

    def add(self, done: Done) -> None:
        """A chunk was made."""
        with self._lock:
            self._done.append(done)
            self._forget(done.ended)

    def of(self, tenant: str, *, busy: bool = False) -> Throughput:
        """What was made for a tenant; `busy`: a chunk of its own is being made."""
        now = self._clock()
        with self._lock:
            self._forget(now)
            mine = [done for done in self._done if done.tenant == tenant]
        if busy and mine:
            # What is being made counts only once it is done: until then, look at the time before.
            now = max(done.ended for done in mine)
        # A chunk counts over all the time it took: else a slow one would be a peak at its end.
        part = WINDOW / PARTS
        edges = [now - WINDOW + i * part for i in range(PARTS)]
        parts = [sum(_within(done, edge, edge + part) for done in mine) for edge in edges]
        window = max(1.0, min(WINDOW, now - self._start))
        steps = sum(done.steps for done in mine)
        return Throughput(
            window=round(window, 1),
            candidates_per_second=round(sum(parts) / window, 3),
            switches=sum(done.switched for done in mine),
            step_seconds=round(sum(done.generate for done in mine) / steps, 5) if steps else None,
            history=tuple(round(made / part, 2) for made in parts),
        )

    def _forget(self, now: float) -> None:
        while self._done and self._done[0].ended < now - WINDOW:
            self._done.popleft()


def _within(done: Done, start: float, end: float) -> float:
    """How many of a chunk's candidates fall between two times."""
    length = max(done.ended - done.began, 1e-6)
    return done.candidates * max(0.0, min(done.ended, end) - max(done.began, start)) / length
