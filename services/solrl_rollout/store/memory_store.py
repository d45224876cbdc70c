"""A run store in this process: needs nothing installed, is lost at exit, and is not shared with other replicas."""

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from solrl_proto.adapters import AdapterInfo, AdapterList, RunList
from solrl_proto.status import IterationReport, Point, Samples

from solrl_rollout.store.errors import RunNotFoundError, head_conflict, not_found, quota_exceeded
from solrl_rollout.store.run_store import (
    DEFAULT_RETAIN,
    KEPT_POINT_BYTES,
    KEPT_POINTS,
    Progress,
    RunStore,
    admit,
    encode_point,
)


@dataclass
class _Run:
    versions: dict[int, tuple[AdapterInfo, bytes]] = field(default_factory=dict)
    points: list[tuple[Point, int]] = field(default_factory=list)
    """Iterations and their bytes as JSON."""
    samples: Samples | None = None
    revision: int = 0

    @property
    def size(self) -> int:
        return sum(info.size for info, _ in self.versions.values())


class MemoryRunStore(RunStore):
    """Run store in dictionaries, for one event loop. It needs no lock: nothing awaits between check and write."""

    def __init__(self, retain: int = DEFAULT_RETAIN, quota: int | None = None) -> None:
        super().__init__(retain, quota)
        self._tenants: defaultdict[str, dict[str, _Run]] = defaultdict(dict)
        self._revision = 0

    async def put(self, tenant: str, info: AdapterInfo, body: bytes) -> tuple[AdapterInfo, bool]:
        runs = self._tenants[tenant]
        run = runs.get(info.run, _Run())
        stored = run.versions.get(info.version)
        stored_info = admit(info, max(run.versions, default=None), stored and stored[0])
        if stored_info is not None:
            return stored_info, False
        old = sorted([*run.versions, info.version])[: -self.retain]
        size = sum(entry.size for entry in runs.values()) + info.size - sum(run.versions[v][0].size for v in old)
        if self.quota is not None and size > self.quota:
            raise quota_exceeded(info.run, info.version, size, self.quota)
        run.versions[info.version] = (info, body)
        for version in old:
            del run.versions[version]
        runs[info.run] = run
        return info, True

    async def get(self, tenant: str, run: str, version: int) -> tuple[AdapterInfo, bytes]:
        return self._find(tenant, run, version)

    async def info(self, tenant: str, run: str, version: int) -> AdapterInfo:
        return self._find(tenant, run, version)[0]

    async def head(self, tenant: str, run: str) -> int | None:
        return max(self._tenants[tenant].get(run, _Run()).versions, default=None)

    async def list(self, tenant: str, run: str) -> AdapterList:
        record = self._run(tenant, run)
        infos = tuple(record.versions[version][0] for version in sorted(record.versions))
        return AdapterList(run=run, head=max(record.versions), versions=infos)

    async def runs(self, tenant: str) -> RunList:
        runs = self._tenants[tenant]
        listed = [await self.list(tenant, run) for run in sorted(runs)]
        return RunList(runs=tuple(listed), size=sum(run.size for run in runs.values()), quota=self.quota)

    async def sizes(self) -> dict[str, int]:
        return {tenant: sum(run.size for run in runs.values()) for tenant, runs in self._tenants.items()}

    async def rewind(self, tenant: str, run: str, version: int, head: int) -> None:
        self._find(tenant, run, version)
        record = self._tenants[tenant][run]
        if max(record.versions) not in (version, head):
            raise head_conflict(run, version, head, max(record.versions))
        record.versions = {v: stored for v, stored in record.versions.items() if v <= version}

    async def delete(self, tenant: str, run: str) -> None:
        if self._tenants[tenant].pop(run, None) is None:
            raise RunNotFoundError(run)

    async def add_iteration(self, tenant: str, run: str, report: IterationReport) -> int:
        record, size = self._run(tenant, run), len(encode_point(report).encode())
        # By the clock, so that revisions keep increasing after a restart.
        self._revision = max(self._revision + 1, time.time_ns() // 1000)
        record.revision = self._revision
        point = Point(**{name: getattr(report, name) for name in Point.model_fields})
        points = [*(entry for entry in record.points if entry[0].iteration < point.iteration), (point, size)][
            -KEPT_POINTS:
        ]
        total, first = sum(size for _, size in points), 0
        while total > KEPT_POINT_BYTES:
            total -= points[first][1]
            first += 1
        record.points = points[first:]
        if report.samples is not None:
            record.samples = report.samples
        elif record.samples is not None and record.samples.iteration > point.iteration:
            record.samples = None
        return record.revision

    async def iterations(self, tenant: str, run: str) -> tuple[Point, ...]:
        return tuple(point for point, _ in self._run(tenant, run).points)

    async def samples(self, tenant: str, run: str) -> Samples | None:
        return self._tenants[tenant].get(run, _Run()).samples

    async def progress(self, tenant: str, runs: Sequence[str]) -> dict[str, Progress]:
        records = ((run, self._tenants[tenant].get(run)) for run in runs)
        return {
            run: Progress(record.revision, record.points[-1][0])
            for run, record in records
            if record is not None and record.points
        }

    async def ping(self) -> None:
        return

    async def close(self) -> None:
        self._tenants.clear()

    def _run(self, tenant: str, run: str) -> _Run:
        if run not in self._tenants[tenant]:
            raise RunNotFoundError(run)
        return self._tenants[tenant][run]

    def _find(self, tenant: str, run: str, version: int) -> tuple[AdapterInfo, bytes]:
        versions = self._tenants[tenant].get(run, _Run()).versions
        if version not in versions:
            raise not_found(run, version, max(versions, default=None), sorted(versions))
        return versions[version]
