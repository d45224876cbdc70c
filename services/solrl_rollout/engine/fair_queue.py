"""A bounded queue in which runs take turns by cost, so that a big experiment cannot starve a small one.

It knows nothing of threads: whoever owns it holds a lock.
"""

from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

Run = Hashable


class Turn(Protocol):
    """What the queue must know of an item."""

    @property
    def run(self) -> Run:
        """Whose turn it takes."""

    @property
    def tenant(self) -> str:
        """Whose quota it counts against."""

    @property
    def job(self) -> Hashable:
        """What it is a part of."""

    @property
    def candidates(self) -> int:
        """What it counts against the limit."""

    @property
    def returning(self) -> int:
        """How many of them come again once it was made; their room is kept."""

    @property
    def cost(self) -> int:
        """What it counts against its run: candidates × steps."""


T = TypeVar("T", bound=Turn)


class QueueFull(Exception):  # noqa: N818
    """The items do not fit; none was taken in. `waiting` candidates do, of `limit`; of one tenant, or of all.

    Those that are to come again count as waiting.
    """

    def __init__(self, waiting: int, limit: int, tenant: str | None) -> None:
        super().__init__(waiting, limit, tenant)
        self.waiting, self.limit, self.tenant = waiting, limit, tenant


class FairQueue(Generic[T]):
    """Items by run. The run that was served least takes the next turn, in the order its items came.

    A turn is up to `turn` items in a row, because changing runs means merging another adapter. Who comes without
    debt does not wait for its end: it is served next.
    """

    def __init__(
        self,
        limit: int,
        *,
        tenant_limit: int | None = None,
        turn: int = 1,
        weight: Callable[[T], float] = lambda item: 1.0,
    ) -> None:
        """Hold at most `limit` candidates, and of one tenant at most `tenant_limit`.

        `weight`: by which an item's cost is multiplied when it is taken.
        """
        self.limit = limit
        self.tenant_limit = tenant_limit or limit
        self.candidates = 0
        self.cost = 0
        self.by_tenant: Counter[str] = Counter()
        self._kept: Counter[tuple[str, Hashable]] = Counter()
        self._turn = turn
        self._weight = weight
        self._waiting: dict[Run, deque[T]] = {}
        self._served: dict[Run, float] = {}
        self._fresh: deque[Run] = deque()
        self._clock = 0.0
        self._last: Run = None
        self._row = 0

    def put(self, items: Sequence[T], *, admitted: bool = False) -> None:
        """Take in all items, or none.

        Args:
            items: in the order in which they are to run.
            admitted: they come again, into the room that was kept for them, before the run's others.

        Raises:
            QueueFull: they do not all fit.
        """
        if not admitted:
            asked = Counter[str]()
            for item in items:
                asked[item.tenant] += item.candidates
            self.require_room(asked)
        for item in items:
            if item.run not in self._waiting:
                # A run that comes back keeps its debt, but never a credit for the time it was away.
                floor = min((self._served[run] for run in self._waiting), default=self._clock)
                debt = self._served.get(item.run, 0)
                if debt <= floor:
                    self._fresh.append(item.run)
                self._served[item.run] = max(debt, floor)
                self._waiting[item.run] = deque()
            if not admitted:
                self._waiting[item.run].append(item)
            self._count(item, 1)
        if admitted:
            for item in reversed(items):
                self._waiting[item.run].appendleft(item)
                self._keep(item, -item.candidates)

    def require_room(self, asked: Mapping[str, int]) -> None:
        """See that so many candidates more of each tenant fit now.

        Raises:
            QueueFull: they do not all fit.
        """
        taken = self.candidates + self._kept.total()
        if taken + sum(asked.values()) > self.limit:
            raise QueueFull(taken, self.limit, None)
        for tenant, candidates in asked.items():
            taken = self.by_tenant[tenant] + sum(kept for (whose, _), kept in self._kept.items() if whose == tenant)
            if taken + candidates > self.tenant_limit:
                raise QueueFull(taken, self.tenant_limit, tenant)

    def take(self) -> T | None:
        """The next item, or None when nothing waits."""
        if not self._waiting:
            return None
        run = self._next()
        self._row = self._row + 1 if run == self._last and self._row < self._turn else 1
        item = self._waiting[run].popleft()
        if not self._waiting[run]:
            del self._waiting[run]
        self._count(item, -1)
        self._keep(item, item.returning)
        self._last, self._clock = run, self._served[run]
        cost = item.cost * self._weight(item)
        self._served[run] += cost
        if self._waiting:
            # An absent run that owes nothing is forgotten, lest every run there ever was be remembered.
            self._served = {r: s for r, s in self._served.items() if r in self._waiting or s > self._clock}
        else:
            # Nobody was kept waiting, so old debts are void; what is made now still counts.
            self._served, self._clock = {run: cost}, 0.0
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

    def release(self, tenant: str, job: Hashable) -> None:
        """Keep no room for a job any more: nothing of it comes again."""
        self._kept.pop((tenant, job), None)

    def heads(self) -> list[T]:
        """The next item of each run."""
        return [items[0] for items in self._waiting.values()]

    def of(self, tenant: str) -> list[T]:
        """What waits of a tenant, each run's in order."""
        return [item for items in self._waiting.values() if items[0].tenant == tenant for item in items]

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def _next(self) -> Run:
        while self._fresh:
            run = self._fresh.popleft()
            if run in self._waiting:
                return run
        if self._last in self._waiting and self._row < self._turn:
            return self._last
        return min(self._waiting, key=lambda run: (self._served[run], run != self._last))

    def _keep(self, item: T, room: int) -> None:
        self._kept[item.tenant, item.job] += room
        if not self._kept[item.tenant, item.job]:
            del self._kept[item.tenant, item.job]

    def _count(self, item: T, sign: int) -> None:
        self.candidates += sign * item.candidates
        self.by_tenant[item.tenant] += sign * item.candidates
        if not self.by_tenant[item.tenant]:
            del self.by_tenant[item.tenant]
        self.cost += sign * item.cost
