"""A bounded queue in which runs take turns by cost, so that a big experiment cannot starve a small one.

It knows nothing of threads: whoever owns it holds a lock.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar


class Turn(Protocol):
    """What the queue must know of an item."""

    @property
    def run(self) -> str | None:
        """Whose turn it takes; None is shared by all requests without an adapter."""

    @property
    def candidates(self) -> int:
        """What it counts against the limit."""

    @property
    def cost(self) -> int:
        """What it counts against its run: candidates × steps."""


T = TypeVar("T", bound=Turn)


class QueueFull(Exception):  # noqa: N818
    """The items do not fit; none was taken in."""


class FairQueue(Generic[T]):
    """Items by run. The run that was served least takes the next turn, in the order its items came."""

    def __init__(self, limit: int) -> None:
        """Hold at most `limit` candidates."""
        self.limit = limit
        self.candidates = 0
        self.cost = 0
        self._waiting: dict[str | None, deque[T]] = {}
        self._served: dict[str | None, int] = {}
        self._clock = 0
        self._last: str | None = None

    def put(self, items: Sequence[T], *, admitted: bool = False) -> None:
        """Take in all items, or none.

        Args:
            items: in the order in which they are to run.
            admitted: they go on with work that was let in before, and are let in again.

        Raises:
            QueueFull: they do not all fit.
        """
        if not admitted and self.candidates + sum(item.candidates for item in items) > self.limit:
            raise QueueFull
        for item in items:
            if item.run not in self._waiting:
                # A run that comes back keeps its debt, but never a credit for the time it was away.
                floor = min((self._served[run] for run in self._waiting), default=self._clock)
                self._served[item.run] = max(self._served.get(item.run, 0), floor)
                self._waiting[item.run] = deque()
            self._waiting[item.run].append(item)
            self._count(item, 1)

    def take(self) -> T | None:
        """The next item, or None when nothing waits."""
        if not self._waiting:
            return None
        # On a tie the run served last goes on: changing runs means merging another adapter.
        run = min(self._waiting, key=lambda run: (self._served[run], run != self._last))
        item = self._waiting[run].popleft()
        if not self._waiting[run]:
            del self._waiting[run]
        self._count(item, -1)
        self._last, self._clock = run, self._served[run]
        self._served[run] += item.cost
        if self._waiting:
            # An absent run that owes nothing is forgotten, lest every run there ever was be remembered.
            self._served = {r: s for r, s in self._served.items() if r in self._waiting or s > self._clock}
        else:
            # Nobody was kept waiting, so old debts are void; what is made now still counts.
            self._served, self._clock = {run: item.cost}, 0
        return item

    def drop(self, unwanted: Callable[[T], bool]) -> list[T]:
        """Take the unwanted items out and return them."""
        dropped = [item for items in self._waiting.values() for item in items if unwanted(item)]
        if dropped:
            kept = {run: deque(i for i in items if not unwanted(i)) for run, items in self._waiting.items()}
            self._waiting = {run: items for run, items in kept.items() if items}
            for item in dropped:
                self._count(item, -1)
        return dropped

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def _count(self, item: T, sign: int) -> None:
        self.candidates += sign * item.candidates
        self.cost += sign * item.cost
