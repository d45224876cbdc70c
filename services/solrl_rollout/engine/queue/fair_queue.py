"""A bounded queue, fair by cost: first among tenants, then among each tenant's runs.

Not thread-safe: its owner holds a lock.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from solrl_http.fair_share import FairShare

from solrl_rollout.engine.work import Chunk

Run = Hashable

NEW_FLOWS_IN_A_ROW = 4
"""New runs of a tenant that are served in a row before one of its older runs."""
RunQueue = OrderedDict[Chunk, None]
"""The waiting chunks of one run, in order."""
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
        sticky: its run gets another turn while it is less than a turn ahead of the least served one. With several
            servers, each then keeps an adapter for longer, and all runs are still served.
        tenant, run: the run that it served last.
        chunks: number of chunks in the current turn.
    """

    sticky: bool = False
    tenant: str = ""
    run: Run = None
    chunks: int = 0


class FairQueue:
    """Chunks by tenant and run. Next is the tenant with the least cost so far, and its run with the least.

    A server takes up to `turn` chunks of a run in a row, because changing the run means merging another adapter.
    Several servers share the costs, and each has turns of its own. A new flow does not wait for the end of a turn. A
    tenant with debt is not new, whatever its runs are named. A new run overtakes only other runs of its tenant, and
    only `NEW_FLOWS_IN_A_ROW` runs do so in a row.

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
        """`weight`: factor of a chunk's cost, evaluated when it is popped."""
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

    def put(self, chunks: Sequence[Chunk]) -> None:
        """Add all chunks, in the order that they are to run in, or none.

        Raises:
            QueueFullError: they do not all fit.
        """
        requested = Counter[str]()
        for chunk in chunks:
            requested[chunk.tenant] += chunk.candidates
        self.require_capacity(requested)
        for chunk in chunks:
            self._add(chunk)

    def require_capacity(self, requested: Mapping[str, int]) -> None:
        """Check that `requested` further candidates of each tenant fit now.

        Raises:
            QueueFullError: they do not all fit.
        """
        if self.by_tenant.total() + sum(requested.values()) > self.limit:
            raise QueueFullError(self.by_tenant.total(), self.limit, None)
        for tenant, candidates in requested.items():
            if self.by_tenant[tenant] + candidates > self.tenant_limit:
                raise QueueFullError(self.by_tenant[tenant], self.tenant_limit, tenant)

    def pop(self, turn: Quantum | None = None, skip: Callable[[Chunk], bool] | None = None) -> Chunk | None:
        """Remove and return the next chunk of a server.

        Args:
            turn: the server's turn; None if it is the only one.
            skip: next chunk of a run → whether the run must wait; None if no run must wait.

        Returns:
            The chunk; None if every run is empty or must wait.
        """
        turn = turn or self._only_turn
        waiting = self._waiting if skip is None else self._without(skip)
        if not waiting:
            return None
        tenant, run = chosen = self._next_run(turn, waiting)
        turn.chunks = turn.chunks + 1 if chosen == (turn.tenant, turn.run) and turn.chunks < self._turn else 1
        turn.tenant, turn.run = chosen
        chunk = _head(self._waiting[tenant][run])
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
        """Put back a taken chunk that will not be finished, as the next of its run; its cost is refunded."""
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
        return [_head(chunks) for runs in self._waiting.values() for chunks in runs.values()]

    def of_tenant(self, tenant: str) -> list[Chunk]:
        """A tenant's chunks, each run's in order."""
        return [chunk for chunks in self._waiting.get(tenant, {}).values() for chunk in chunks]

    def _add(self, chunk: Chunk, *, first: bool = False) -> None:
        """Insert a chunk at the front (`first`) or back of its run's queue."""
        tenant, run = chunk.tenant, chunk.run
        if tenant not in self._waiting:
            self._tenants.arrive(tenant, self._waiting.keys())
            self._waiting[tenant] = {}
        runs = self._waiting[tenant]
        if run not in runs:
            self._runs.setdefault(tenant, FairShare()).arrive(run, runs.keys())
            runs[run] = RunQueue()
        runs[run][chunk] = None
        runs[run].move_to_end(chunk, last=not first)
        self._of_jobs.setdefault(chunk.job, {})[chunk] = None
        self._count(chunk, 1)

    def _remove(self, chunk: Chunk) -> None:
        """Remove a waiting chunk, and its run, tenant and job if they are empty then."""
        runs, of_job = self._waiting[chunk.tenant], self._of_jobs[chunk.job]
        del runs[chunk.run][chunk]
        if not runs[chunk.run]:
            del runs[chunk.run]
        if not runs:
            del self._waiting[chunk.tenant]
        del of_job[chunk]
        if not of_job:
            del self._of_jobs[chunk.job]
        self._count(chunk, -1)

    def _without(self, skip: Callable[[Chunk], bool]) -> Waiting:
        """The waiting chunks of runs that need not wait."""
        ready = {
            tenant: {run: chunks for run, chunks in runs.items() if not skip(_head(chunks))}
            for tenant, runs in self._waiting.items()
        }
        return {tenant: runs for tenant, runs in ready.items() if runs}

    def _next_run(self, turn: Quantum, waiting: Waiting) -> tuple[str, Run]:
        tenant = self._tenants.new_flow(self._waiting.keys(), waiting.keys())
        if tenant is None:
            if turn.run in waiting.get(turn.tenant, {}) and turn.chunks < self._turn:
                tenant = turn.tenant
            else:
                tenant = self._tenants.least_served(waiting.keys(), turn.tenant, self._surplus(turn))
        self._tenants.admit(tenant)
        return tenant, self._next_of(tenant, turn, waiting[tenant])

    def _next_of(self, tenant: str, turn: Quantum, runs: dict[Run, RunQueue]) -> Run:
        """A new run of the tenant, unless enough came first; otherwise the rest of a turn, or its least served run."""
        share = self._runs[tenant]
        new = share.new_flow(self._waiting[tenant].keys(), runs.keys())
        last = turn.run if turn.tenant == tenant else None
        if new is not None and self._new_flows_served < NEW_FLOWS_IN_A_ROW:
            chosen = new
            self._new_flows_served += 1
        else:
            self._new_flows_served = 0
            if last in runs and turn.chunks < self._turn:
                chosen = last
            else:
                chosen = share.least_served(runs.keys(), last, self._surplus(turn))
        share.admit(chosen)
        return chosen

    def _surplus(self, turn: Quantum) -> float:
        """Most cost above the least served run's that still gives a server's run another turn."""
        chunks = self._waiting.get(turn.tenant, {}).get(turn.run)
        if not turn.sticky or not chunks:
            return 0.0
        head = _head(chunks)
        return (self._turn - 1) * head.cost * self._weight(head)

    def _count(self, chunk: Chunk, sign: int) -> None:
        self.by_tenant[chunk.tenant] += sign * chunk.candidates
        if not self.by_tenant[chunk.tenant]:
            del self.by_tenant[chunk.tenant]
        self.cost += sign * chunk.cost


def _head(chunks: RunQueue) -> Chunk:
    return next(iter(chunks))
