"""A bounded queue that is fair to tenants first and then to the runs of each, by cost.

Not thread-safe: its owner holds a lock.
"""

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from solrl_http.fair_share import FairShare

from solrl_rollout.engine.errors import QueueFullError

Run = Hashable

NEW_FLOWS_IN_A_ROW = 4
"""New runs of a tenant that are served in a row before one of its older runs."""
AHEAD_ITEMS = 64
"""Items by which a run that waits for its next one may get ahead of the tenant's runs that only work ahead: the
samples of an iteration of 48 prompts, and some more."""


class QueueItem(Protocol):
    """The properties of an item that the queue needs."""

    @property
    def run(self) -> Run:
        """The run in whose turn it is served."""

    @property
    def tenant(self) -> str:
        """The tenant whose quota it counts against."""

    @property
    def job(self) -> Hashable:
        """The job it is part of."""

    @property
    def ahead(self) -> bool:
        """Whether nobody waits for it yet."""

    @property
    def candidates(self) -> int:
        """The number that counts against the limits."""

    @property
    def reserved(self) -> int:
        """The most candidates that return to the queue after it has run; capacity is reserved for them."""

    @property
    def cost(self) -> int:
        """Candidates × steps, which count against its run."""


Item = TypeVar("Item", bound=QueueItem)
Waiting = dict[str, dict[Run, deque[Item]]]
"""Items by tenant and run."""


@dataclass
class Quantum:
    """The turns of one server of the queue.

    Attributes:
        keeps_run: its run gets another turn while it is less than a turn ahead of the least served one. With several
            servers, each then keeps an adapter for longer, and all runs are still served.
        tenant, run: the run that it served last.
        taken: number of items in the current turn.
    """

    keeps_run: bool = False
    tenant: str = ""
    run: Run = None
    taken: int = 0


class FairQueue(Generic[Item]):
    """Items by tenant and run. Next is the tenant with the least cost so far, and its run with the least.

    A server takes up to `turn` items of a run in a row, because changing the run means merging another adapter. Several
    servers share the costs, and each has turns of its own. A new flow does not wait for the end of a turn. A tenant
    with debt is not new, whatever its runs are named. A new run overtakes only other runs of its tenant, and
    only `NEW_FLOWS_IN_A_ROW` runs do so in a row.

    Items that somebody waits for go before those that are `ahead`: within a run always, and among the runs of a tenant
    as long as that gives none a lead of more than `AHEAD_ITEMS` items.

    Attributes:
        limit, tenant_limit: the most candidates that may wait, of all tenants and of one.
        candidates: number of waiting candidates; `by_tenant`: of each tenant.
        cost: cost of the waiting items.
    """

    def __init__(
        self,
        limit: int,
        *,
        tenant_limit: int | None = None,
        turn: int = 1,
        weight: Callable[[Item], float] = lambda item: 1.0,
    ) -> None:
        """`weight`: factor of an item's cost, evaluated when it is taken."""
        self.limit = limit
        self.tenant_limit = tenant_limit or limit
        self.candidates = 0
        self.cost = 0
        self.by_tenant: Counter[str] = Counter()
        self._reserved: Counter[tuple[str, Hashable]] = Counter()
        self._turn = turn
        self._weight = weight
        self._waiting: Waiting[Item] = {}
        self._tenants: FairShare[str] = FairShare()
        self._runs: dict[str, FairShare[Run]] = {}
        self._only_turn = Quantum()
        self._new_flows_served = 0

    def put(self, items: Sequence[Item], *, reserved: bool = False) -> None:
        """Add all items, or none.

        Args:
            items: in the order in which they are to run.
            reserved: they return to capacity reserved for them, ahead of the run's other items.

        Raises:
            QueueFullError: they do not all fit.
        """
        if not reserved:
            requested = Counter[str]()
            for item in items:
                requested[item.tenant] += item.candidates
            self.require_capacity(requested)
        for item in items:
            self._arrive(item)
            self._count(item, 1)
        for item in reversed(items) if reserved else items:
            self._enqueue(item, first=reserved)
            if reserved:
                self._reserve(item, -item.candidates)

    def require_capacity(self, requested: Mapping[str, int]) -> None:
        """Check that this many more candidates of each tenant fit now.

        Raises:
            QueueFullError: they do not all fit.
        """
        taken = self.candidates + self._reserved.total()
        if taken + sum(requested.values()) > self.limit:
            raise QueueFullError(taken, self.limit, None)
        for tenant, candidates in requested.items():
            reserved = sum(count for (owner, _), count in self._reserved.items() if owner == tenant)
            taken = self.by_tenant[tenant] + reserved
            if taken + candidates > self.tenant_limit:
                raise QueueFullError(taken, self.tenant_limit, tenant)

    def take(self, turn: Quantum | None = None, held: Callable[[Item], bool] | None = None) -> Item | None:
        """Remove and return the next item of a server.

        Args:
            turn: the server's turn; None if it is the only one.
            held: whether a run must wait whose next item this is; None if none must.

        Returns:
            The item; None when no run has one that may be taken.
        """
        turn = turn or self._only_turn
        waiting = self._waiting if held is None else self._without(held)
        if not waiting:
            return None
        tenant, run = chosen = self._next_run(turn, waiting)
        turn.taken = turn.taken + 1 if chosen == (turn.tenant, turn.run) and turn.taken < self._turn else 1
        turn.tenant, turn.run = chosen
        item = self._waiting[tenant][run].popleft()
        self._drop_empty(tenant)
        self._count(item, -1)
        self._reserve(item, item.reserved)
        cost = item.cost * self._weight(item)
        self._runs[tenant].serve(run, cost, self._waiting.get(tenant, {}).keys())
        self._tenants.serve(tenant, cost, self._waiting.keys())
        self._runs = {name: share for name, share in self._runs.items() if name in self._tenants}
        return item

    def charge(self, item: Item, cost: float) -> None:
        """Add a cost that was unknown when the item was taken, e.g. of merging its adapter."""
        self._tenants.charge(item.tenant, cost)
        if item.tenant in self._runs:
            self._runs[item.tenant].charge(item.run, cost)

    def put_back(self, item: Item) -> None:
        """Return an item that was taken and will not be finished; it is the next of its run, which pays nothing."""
        self._arrive(item)
        self._enqueue(item, first=True)
        self._count(item, 1)
        self._reserve(item, -item.reserved)
        self.charge(item, -item.cost * self._weight(item))

    def remove(self, unwanted: Callable[[Item], bool]) -> list[Item]:
        """Remove and return the unwanted items."""
        removed = [item for item in self._items() if unwanted(item)]
        if removed:
            for runs in self._waiting.values():
                for run, items in runs.items():
                    runs[run] = deque(item for item in items if not unwanted(item))
            for tenant in list(self._waiting):
                self._drop_empty(tenant)
            for item in removed:
                self._count(item, -1)
        return removed

    def release(self, tenant: str, job: Hashable) -> None:
        """Give up the capacity reserved for a job."""
        self._reserved.pop((tenant, job), None)

    def heads(self) -> list[Item]:
        """The next item of each run."""
        return [items[0] for runs in self._waiting.values() for items in runs.values()]

    def of_tenant(self, tenant: str) -> list[Item]:
        """A tenant's items, each run's in order."""
        return [item for items in self._waiting.get(tenant, {}).values() for item in items]

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def _items(self) -> Iterator[Item]:
        return (item for runs in self._waiting.values() for items in runs.values() for item in items)

    def _arrive(self, item: Item) -> None:
        """Register the item's tenant and run as waiting, unless they already are."""
        tenant, run = item.tenant, item.run
        if tenant not in self._waiting:
            self._tenants.arrive(tenant, self._waiting.keys())
            self._waiting[tenant] = {}
        runs = self._waiting[tenant]
        if run not in runs:
            self._runs.setdefault(tenant, FairShare()).arrive(run, runs.keys())
            runs[run] = deque()

    def _enqueue(self, item: Item, *, first: bool) -> None:
        """Add an item to its run's, the first or last of those that are ahead like it or are not."""
        items = self._waiting[item.tenant][item.run]
        waited = next((place for place, other in enumerate(items) if other.ahead), len(items))
        if item.ahead:
            items.insert(waited if first else len(items), item)
        else:
            items.insert(0 if first else waited, item)

    def _without(self, held: Callable[[Item], bool]) -> Waiting[Item]:
        """The waiting items of runs that need not wait."""
        ready = {
            tenant: {run: items for run, items in runs.items() if not held(items[0])}
            for tenant, runs in self._waiting.items()
        }
        return {tenant: runs for tenant, runs in ready.items() if runs}

    def _next_run(self, turn: Quantum, waiting: Waiting[Item]) -> tuple[str, Run]:
        tenant = self._tenants.new_flow(self._waiting.keys(), waiting.keys())
        if tenant is None:
            if turn.run in waiting.get(turn.tenant, {}) and turn.taken < self._turn:
                tenant = turn.tenant
            else:
                tenant = self._tenants.least_served(waiting.keys(), turn.tenant, self._lead(turn))
        self._tenants.admit(tenant)
        return tenant, self._next_of(tenant, turn, waiting[tenant])

    def _next_of(self, tenant: str, turn: Quantum, runs: dict[Run, deque[Item]]) -> Run:
        """A new run of the tenant, unless enough came first; otherwise the rest of a turn, or its least served run."""
        share = self._runs[tenant]
        runs = self._waited(share, runs)
        new = share.new_flow(self._waiting[tenant].keys(), runs.keys())
        last = turn.run if turn.tenant == tenant else None
        if new is not None and self._new_flows_served < NEW_FLOWS_IN_A_ROW:
            chosen = new
            self._new_flows_served += 1
        else:
            self._new_flows_served = 0
            if last in runs and turn.taken < self._turn:
                chosen = last
            else:
                chosen = share.least_served(runs.keys(), last, self._lead(turn))
        share.admit(chosen)
        return chosen

    def _waited(self, share: FairShare[Run], runs: dict[Run, deque[Item]]) -> dict[Run, deque[Item]]:
        """The runs of a tenant that wait for their next item, unless there are none or they are too far ahead."""
        waited = {run: items for run, items in runs.items() if not items[0].ahead}
        if not waited or len(waited) == len(runs):
            return runs
        most = max(items[0].cost * self._weight(items[0]) for items in waited.values())
        return waited if share.lead(waited, runs) < AHEAD_ITEMS * most else runs

    def _lead(self, turn: Quantum) -> float:
        """The cost by which a server's run may be ahead of the least served one and get another turn."""
        items = self._waiting.get(turn.tenant, {}).get(turn.run)
        if not turn.keeps_run or not items:
            return 0.0
        return (self._turn - 1) * items[0].cost * self._weight(items[0])

    def _drop_empty(self, tenant: str) -> None:
        runs = self._waiting[tenant]
        for run in [run for run, items in runs.items() if not items]:
            del runs[run]
        if not runs:
            del self._waiting[tenant]

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
