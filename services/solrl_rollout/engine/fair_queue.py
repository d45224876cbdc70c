"""A bounded queue in which runs take turns by cost, so that a big experiment cannot starve a small one.

It knows nothing of threads: its owner holds a lock.
"""

from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

Run = Hashable


class QueueItem(Protocol):
    """The properties of an item that the queue needs."""

    @property
    def run(self) -> Run:
        """The run whose turn it takes."""

    @property
    def tenant(self) -> str:
        """The tenant whose quota it counts against."""

    @property
    def job(self) -> Hashable:
        """The job it is part of."""

    @property
    def candidates(self) -> int:
        """The number that counts against the limits."""

    @property
    def reserved(self) -> int:
        """The most candidates that come back after it has run; capacity for them is reserved meanwhile."""

    @property
    def cost(self) -> int:
        """Candidates × steps, which count against its run."""


Item = TypeVar("Item", bound=QueueItem)


class QueueFull(Exception):  # noqa: N818
    """The items do not fit, and none was added.

    Attributes:
        waiting: candidates that wait or for which capacity is reserved, of `tenant` or of all.
        limit: the most that may.
        tenant: the tenant whose limit is reached; None for the limit of all.
    """

    def __init__(self, waiting: int, limit: int, tenant: str | None) -> None:
        super().__init__(waiting, limit, tenant)
        self.waiting, self.limit, self.tenant = waiting, limit, tenant


class FairQueue(Generic[Item]):
    """Items by run. The next turn goes to the run with the least cost so far, whose items come in their order.

    A turn is up to `turn` items in a row, because another run means merging another adapter. A run that arrives
    without debt does not wait for the end of a turn: it is next.

    Attributes:
        limit, tenant_limit: the most candidates that may wait, of all tenants and of one.
        candidates: candidates that wait; `by_tenant`: those of each tenant.
        cost: cost of the items that wait.
    """

    def __init__(
        self,
        limit: int,
        *,
        tenant_limit: int | None = None,
        turn: int = 1,
        weight: Callable[[Item], float] = lambda item: 1.0,
    ) -> None:
        """`weight`: the factor of an item's cost, asked when it is taken."""
        self.limit = limit
        self.tenant_limit = tenant_limit or limit
        self.candidates = 0
        self.cost = 0
        self.by_tenant: Counter[str] = Counter()
        self._reserved: Counter[tuple[str, Hashable]] = Counter()
        self._turn = turn
        self._weight = weight
        self._waiting: dict[Run, deque[Item]] = {}
        self._spent: dict[Run, float] = {}
        self._arrived: deque[Run] = deque()
        self._clock = 0.0
        self._last: Run = None
        self._in_turn = 0

    def put(self, items: Sequence[Item], *, reserved: bool = False) -> None:
        """Add all items, or none.

        Args:
            items: in the order in which they are to run.
            reserved: whether they come back into the capacity reserved for them, ahead of the run's other items.

        Raises:
            QueueFull: they do not all fit.
        """
        if not reserved:
            requested = Counter[str]()
            for item in items:
                requested[item.tenant] += item.candidates
            self.require_capacity(requested)
        for item in items:
            if item.run not in self._waiting:
                # A run that comes back keeps its debt, but never a credit for the time it was away.
                floor = min((self._spent[run] for run in self._waiting), default=self._clock)
                debt = self._spent.get(item.run, 0)
                if debt <= floor:
                    self._arrived.append(item.run)
                self._spent[item.run] = max(debt, floor)
                self._waiting[item.run] = deque()
            if not reserved:
                self._waiting[item.run].append(item)
            self._count(item, 1)
        if reserved:
            for item in reversed(items):
                self._waiting[item.run].appendleft(item)
                self._reserve(item, -item.candidates)

    def require_capacity(self, requested: Mapping[str, int]) -> None:
        """Check that this many more candidates of each tenant fit now.

        Raises:
            QueueFull: they do not all fit.
        """
        taken = self.candidates + self._reserved.total()
        if taken + sum(requested.values()) > self.limit:
            raise QueueFull(taken, self.limit, None)
        for tenant, candidates in requested.items():
            reserved = sum(count for (owner, _), count in self._reserved.items() if owner == tenant)
            taken = self.by_tenant[tenant] + reserved
            if taken + candidates > self.tenant_limit:
                raise QueueFull(taken, self.tenant_limit, tenant)

    def take(self) -> Item | None:
        """Remove and return the next item; None when the queue is empty."""
        if not self._waiting:
            return None
        run = self._next_run()
        self._in_turn = self._in_turn + 1 if run == self._last and self._in_turn < self._turn else 1
        item = self._waiting[run].popleft()
        if not self._waiting[run]:
            del self._waiting[run]
        self._count(item, -1)
        self._reserve(item, item.reserved)
        self._last, self._clock = run, self._spent[run]
        cost = item.cost * self._weight(item)
        self._spent[run] += cost
        if self._waiting:
            # Absent runs without debt are forgotten, or every run there ever was would be remembered.
            self._spent = {r: s for r, s in self._spent.items() if r in self._waiting or s > self._clock}
        else:
            # No run is waiting, so old debts are void; the item just taken still counts.
            self._spent, self._clock = {run: cost}, 0.0
        return item

    def remove(self, unwanted: Callable[[Item], bool]) -> list[Item]:
        """Remove and return the unwanted items."""
        removed = [item for items in self._waiting.values() for item in items if unwanted(item)]
        if removed:
            left = {run: deque(i for i in items if not unwanted(i)) for run, items in self._waiting.items()}
            self._waiting = {run: items for run, items in left.items() if items}
            for item in removed:
                self._count(item, -1)
        return removed

    def release(self, tenant: str, job: Hashable) -> None:
        """Give up the capacity reserved for a job."""
        self._reserved.pop((tenant, job), None)

    def heads(self) -> list[Item]:
        """The next item of each run."""
        return [items[0] for items in self._waiting.values()]

    def of_tenant(self, tenant: str) -> list[Item]:
        """A tenant's items, each run's in order."""
        return [item for items in self._waiting.values() if items[0].tenant == tenant for item in items]

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def _next_run(self) -> Run:
        while self._arrived:
            run = self._arrived.popleft()
            if run in self._waiting:
                return run
        if self._last in self._waiting and self._in_turn < self._turn:
            return self._last
        return min(self._waiting, key=lambda run: (self._spent[run], run != self._last))

    def _reserve(self, item: Item, candidates: int) -> None:
        self._reserved[item.tenant, item.job] += candidates
        if not self._reserved[item.tenant, item.job]:
            del self._reserved[item.tenant, item.job]

    def _count(self, item: Item, sign: int) -> None:
        self.candidates += sign * item.candidates
        self.by_tenant[item.tenant] += sign * item.candidates
        if not self.by_tenant[item.tenant]:
            del self.by_tenant[item.tenant]
        self.cost += sign * item.cost
