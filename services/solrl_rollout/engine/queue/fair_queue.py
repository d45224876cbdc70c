"""A bounded queue that is fair to tenants first and then to the runs of each, by cost.

Not thread-safe: its owner holds a lock.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from solrl_http.fair_share import FairShare

from solrl_rollout.engine.work import Chunk

Run = Hashable

NEW_FLOWS_IN_A_ROW = 4
"""New runs of a tenant that are served in a row before one of its older runs."""
AHEAD_CHUNKS = 64
"""Chunks by which a run that waits for its next one may get ahead of the tenant's runs that only work ahead: the
samples of an iteration of 48 prompts, and some more."""


class RunQueue:
    """The waiting chunks of one run: those that somebody waits for, then those that are ahead.

    Adding, taking and removing a chunk take the same time however many wait. An empty one is false.
    """

    def __init__(self) -> None:
        self._awaited: OrderedDict[Chunk, None] = OrderedDict()
        self._ahead: OrderedDict[Chunk, None] = OrderedDict()

    def add(self, chunk: Chunk, *, first: bool) -> None:
        """Add a chunk, the first or last of its kind."""
        kind = self._ahead if chunk.ahead else self._awaited
        kind[chunk] = None
        if first:
            kind.move_to_end(chunk, last=False)

    def remove(self, chunk: Chunk) -> None:
        """Remove a chunk that waits here."""
        del (self._ahead if chunk.ahead else self._awaited)[chunk]

    @property
    def head(self) -> Chunk:
        """The next chunk."""
        return next(iter(self))

    def __iter__(self) -> Iterator[Chunk]:
        yield from self._awaited
        yield from self._ahead

    def __bool__(self) -> bool:
        return bool(self._awaited or self._ahead)


Waiting = dict[str, dict[Run, RunQueue]]
"""Waiting chunks by tenant and run; none is empty."""


@dataclass(eq=False)
class QueueFullError(Exception):
    """Candidates do not fit into the queue, and none was added.

    Attributes:
        waiting: waiting candidates, of `tenant` or of all.
        limit: the most that may wait.
        tenant: the tenant whose limit is reached; None for the limit of all.
    """

    waiting: int
    limit: int
    tenant: str | None


@dataclass
class Quantum:
    """The turns of one server of the queue.

    Attributes:
        keeps_run: its run gets another turn while it is less than a turn ahead of the least served one. With several
            servers, each then keeps an adapter for longer, and all runs are still served.
        tenant, run: the run that it served last.
        taken: number of chunks in the current turn.
    """

    keeps_run: bool = False
    tenant: str = ""
    run: Run = None
    taken: int = 0


class FairQueue:
    """Chunks by tenant and run. Next is the tenant with the least cost so far, and its run with the least.

    A server takes up to `turn` chunks of a run in a row, because changing the run means merging another adapter.
    Several servers share the costs, and each has turns of its own. A new flow does not wait for the end of a turn. A
    tenant with debt is not new, whatever its runs are named. A new run overtakes only other runs of its tenant, and
    only `NEW_FLOWS_IN_A_ROW` runs do so in a row.

    Chunks that somebody waits for go before those that are `ahead`: within a run always, and among the runs of a tenant
    as long as that gives none a lead of more than `AHEAD_CHUNKS` chunks.

    Attributes:
        limit, tenant_limit: the most candidates that may wait, of all tenants and of one.
        by_tenant: number of waiting candidates of each tenant.
        cost: cost of the waiting chunks.
    """

    def __init__(
        self,
        limit: int,
        *,
        tenant_limit: int | None = None,
        turn: int = 1,
        weight: Callable[[Chunk], float] = lambda chunk: 1.0,
    ) -> None:
        """`weight`: factor of a chunk's cost, evaluated when it is taken."""
        self.limit = limit
        self.tenant_limit = tenant_limit or limit
        self.cost = 0
        self.by_tenant: Counter[str] = Counter()
        self._turn = turn
        self._weight = weight
        self._waiting: Waiting = {}
        self._of_jobs: dict[Hashable, dict[Chunk, None]] = {}
        self._tenants: FairShare[str] = FairShare()
        self._runs: dict[str, FairShare[Run]] = {}
        self._only_turn = Quantum()
        self._new_flows_served = 0

    def put(self, chunks: Sequence[Chunk], *, first: bool = False) -> None:
        """Add all chunks, or none.

        Args:
            chunks: in the order in which they are to run.
            first: they continue chunks that were taken: they go before the run's others, also beyond the limits.

        Raises:
            QueueFullError: they do not all fit.
        """
        if not first:
            requested = Counter[str]()
            for chunk in chunks:
                requested[chunk.tenant] += chunk.candidates
            self.require_capacity(requested)
        for chunk in reversed(chunks) if first else chunks:
            self._add(chunk, first=first)

    def require_capacity(self, requested: Mapping[str, int]) -> None:
        """Check that this many more candidates of each tenant fit now.

        Raises:
            QueueFullError: they do not all fit.
        """
        if self.by_tenant.total() + sum(requested.values()) > self.limit:
            raise QueueFullError(self.by_tenant.total(), self.limit, None)
        for tenant, candidates in requested.items():
            if self.by_tenant[tenant] + candidates > self.tenant_limit:
                raise QueueFullError(self.by_tenant[tenant], self.tenant_limit, tenant)

    def take(self, turn: Quantum | None = None, held: Callable[[Chunk], bool] | None = None) -> Chunk | None:
        """Remove and return the next chunk of a server.

        Args:
            turn: the server's turn; None if it is the only one.
            held: whether a run must wait whose next chunk this is; None if none must.

        Returns:
            The chunk; None when no run has one that may be taken.
        """
        turn = turn or self._only_turn
        waiting = self._waiting if held is None else self._without(held)
        if not waiting:
            return None
        tenant, run = chosen = self._next_run(turn, waiting)
        turn.taken = turn.taken + 1 if chosen == (turn.tenant, turn.run) and turn.taken < self._turn else 1
        turn.tenant, turn.run = chosen
        chunk = self._waiting[tenant][run].head
        self._remove(chunk)
        cost = chunk.cost * self._weight(chunk)
        self._runs[tenant].serve(run, cost, self._waiting.get(tenant, {}).keys())
        self._tenants.serve(tenant, cost, self._waiting.keys())
        self._runs = {name: share for name, share in self._runs.items() if name in self._tenants}
        return chunk

    def charge(self, chunk: Chunk, cost: float) -> None:
        """Add a cost that was unknown when the chunk was taken, e.g. of merging its adapter."""
        self._tenants.charge(chunk.tenant, cost)
        if chunk.tenant in self._runs:
            self._runs[chunk.tenant].charge(chunk.run, cost)

    def put_back(self, chunk: Chunk) -> None:
        """Return a chunk that was taken and will not be finished; it is the next of its run, which pays nothing."""
        self._add(chunk, first=True)
        self.charge(chunk, -chunk.cost * self._weight(chunk))

    def remove(self, job: Hashable) -> list[Chunk]:
        """Remove and return the waiting chunks of a job."""
        removed = list(self._of_jobs.get(job, ()))
        for chunk in removed:
            self._remove(chunk)
        return removed

    def clear(self) -> list[Chunk]:
        """Remove and return all waiting chunks."""
        return [chunk for job in list(self._of_jobs) for chunk in self.remove(job)]

    def heads(self) -> list[Chunk]:
        """The next chunk of each run."""
        return [chunks.head for runs in self._waiting.values() for chunks in runs.values()]

    def of_tenant(self, tenant: str) -> list[Chunk]:
        """A tenant's chunks, each run's in order."""
        return [chunk for chunks in self._waiting.get(tenant, {}).values() for chunk in chunks]

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def _add(self, chunk: Chunk, *, first: bool) -> None:
        """Add a chunk to its run's, the first or last of its kind."""
        tenant, run = chunk.tenant, chunk.run
        if tenant not in self._waiting:
            self._tenants.arrive(tenant, self._waiting.keys())
            self._waiting[tenant] = {}
        runs = self._waiting[tenant]
        if run not in runs:
            self._runs.setdefault(tenant, FairShare()).arrive(run, runs.keys())
            runs[run] = RunQueue()
        runs[run].add(chunk, first=first)
        self._of_jobs.setdefault(chunk.job, {})[chunk] = None
        self._count(chunk, 1)

    def _remove(self, chunk: Chunk) -> None:
        """Remove a waiting chunk, and what it leaves empty."""
        runs, of_job = self._waiting[chunk.tenant], self._of_jobs[chunk.job]
        runs[chunk.run].remove(chunk)
        if not runs[chunk.run]:
            del runs[chunk.run]
        if not runs:
            del self._waiting[chunk.tenant]
        del of_job[chunk]
        if not of_job:
            del self._of_jobs[chunk.job]
        self._count(chunk, -1)

    def _without(self, held: Callable[[Chunk], bool]) -> Waiting:
        """The waiting chunks of runs that need not wait."""
        ready = {
            tenant: {run: chunks for run, chunks in runs.items() if not held(chunks.head)}
            for tenant, runs in self._waiting.items()
        }
        return {tenant: runs for tenant, runs in ready.items() if runs}

    def _next_run(self, turn: Quantum, waiting: Waiting) -> tuple[str, Run]:
        tenant = self._tenants.new_flow(self._waiting.keys(), waiting.keys())
        if tenant is None:
            if turn.run in waiting.get(turn.tenant, {}) and turn.taken < self._turn:
                tenant = turn.tenant
            else:
                tenant = self._tenants.least_served(waiting.keys(), turn.tenant, self._lead(turn))
        self._tenants.admit(tenant)
        return tenant, self._next_of(tenant, turn, waiting[tenant])

    def _next_of(self, tenant: str, turn: Quantum, runs: dict[Run, RunQueue]) -> Run:
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

    def _waited(self, share: FairShare[Run], runs: dict[Run, RunQueue]) -> dict[Run, RunQueue]:
        """The runs of a tenant that wait for their next chunk, unless there are none or they are too far ahead."""
        waited = {run: chunks for run, chunks in runs.items() if not chunks.head.ahead}
        if not waited or len(waited) == len(runs):
            return runs
        most = max(chunks.head.cost * self._weight(chunks.head) for chunks in waited.values())
        return waited if share.lead(waited, runs) < AHEAD_CHUNKS * most else runs

    def _lead(self, turn: Quantum) -> float:
        """The cost by which a server's run may be ahead of the least served one and get another turn."""
        chunks = self._waiting.get(turn.tenant, {}).get(turn.run)
        if not turn.keeps_run or not chunks:
            return 0.0
        return (self._turn - 1) * chunks.head.cost * self._weight(chunks.head)

    def _count(self, chunk: Chunk, sign: int) -> None:
        self.by_tenant[chunk.tenant] += sign * chunk.candidates
        if not self.by_tenant[chunk.tenant]:
            del self.by_tenant[chunk.tenant]
        self.cost += sign * chunk.cost
