"""Adapters in this process: nothing to install, gone at exit, invisible to other replicas."""

from collections import defaultdict
from dataclasses import dataclass, field

from solrl_proto.adapters import AdapterInfo, AdapterList, RunList

from solrl_rollout.store.base import (
    DEFAULT_RETAIN,
    AdapterStore,
    admit,
    evicted,
    not_found,
    over_quota,
    verify_put,
    verify_stored,
)


@dataclass
class _Run:
    versions: dict[int, tuple[AdapterInfo, bytes]] = field(default_factory=dict)
    pinned: set[int] = field(default_factory=set)

    @property
    def size(self) -> int:
        return sum(info.size for info, _ in self.versions.values())


class MemoryAdapterStore(AdapterStore):
    """Dictionaries, for one event loop. No lock: nothing awaits between judging and writing."""

    def __init__(self, retain: int = DEFAULT_RETAIN, quota: int | None = None) -> None:
        super().__init__(retain, quota)
        self._tenants: defaultdict[str, dict[str, _Run]] = defaultdict(dict)

    async def put(self, tenant: str, info: AdapterInfo, body: bytes) -> tuple[AdapterInfo, bool]:
        await verify_put(info, body)
        runs = self._tenants[tenant]
        run = runs.get(info.run, _Run())
        stored = run.versions.get(info.version)
        same = admit(info, max(run.versions, default=None), stored and stored[0])
        if same is not None:
            return same, False
        old = evicted([*run.versions, info.version], run.pinned, self.retain)
        held = sum(one.size for one in runs.values()) + info.size - sum(run.versions[v][0].size for v in old)
        if self.quota is not None and held > self.quota:
            raise over_quota(info, held, self.quota)
        run.versions[info.version] = (info, body)
        for version in old:
            del run.versions[version]
        runs[info.run] = run
        return info, True

    async def get(self, tenant: str, run: str, version: int) -> tuple[AdapterInfo, bytes]:
        info, body = self._find(tenant, run, version)
        await verify_stored(info, body)
        return info, body

    async def info(self, tenant: str, run: str, version: int) -> AdapterInfo:
        return self._find(tenant, run, version)[0]

    async def list(self, tenant: str, run: str) -> AdapterList:
        held = self._tenants[tenant].get(run)
        if held is None:
            raise not_found(run, 0, None, ())
        infos = tuple(held.versions[version][0] for version in sorted(held.versions))
        return AdapterList(run=run, head=max(held.versions), pinned=tuple(sorted(held.pinned)), versions=infos)

    async def runs(self, tenant: str) -> RunList:
        runs = self._tenants[tenant]
        listed = [await self.list(tenant, run) for run in sorted(runs)]
        return RunList(runs=tuple(listed), size=sum(run.size for run in runs.values()), quota=self.quota)

    async def pin(self, tenant: str, run: str, version: int, pinned: bool) -> None:
        self._find(tenant, run, version)
        pins = self._tenants[tenant][run].pinned
        (pins.add if pinned else pins.discard)(version)

    async def delete(self, tenant: str, run: str) -> None:
        if self._tenants[tenant].pop(run, None) is None:
            raise not_found(run, 0, None, ())

    async def ping(self) -> None:
        return

    async def close(self) -> None:
        self._tenants.clear()

    def _find(self, tenant: str, run: str, version: int) -> tuple[AdapterInfo, bytes]:
        held = self._tenants[tenant].get(run, _Run()).versions
        if version not in held:
            raise not_found(run, version, max(held, default=None), held)
        return held[version]
