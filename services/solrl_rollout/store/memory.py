"""Adapters in this process: nothing to install, gone at exit, invisible to other replicas."""

from solrl_proto.adapters import AdapterInfo, AdapterList

from solrl_rollout.store.base import DEFAULT_RETAIN, AdapterStore, admit, not_found, verify_put, verify_stored


class MemoryAdapterStore(AdapterStore):
    """A dictionary a run, for one event loop. No lock: nothing awaits between judging and writing."""

    def __init__(self, retain: int = DEFAULT_RETAIN) -> None:
        super().__init__(retain)
        self._runs: dict[str, dict[int, tuple[AdapterInfo, bytes]]] = {}

    async def put(self, info: AdapterInfo, body: bytes) -> AdapterInfo:
        await verify_put(info, body)
        versions = self._runs.get(info.run, {})
        stored = versions.get(info.version)
        same = admit(info, max(versions, default=None), stored and stored[0])
        if same is not None:
            return same
        versions[info.version] = (info, body)
        for old in sorted(versions)[: -self.retain]:
            del versions[old]
        self._runs[info.run] = versions
        return info

    async def get(self, run: str, version: int) -> tuple[AdapterInfo, bytes]:
        info, body = self._find(run, version)
        await verify_stored(info, body)
        return info, body

    async def info(self, run: str, version: int) -> AdapterInfo:
        return self._find(run, version)[0]

    async def list(self, run: str) -> AdapterList:
        versions = self._runs.get(run)
        if not versions:
            raise not_found(run, 0, None, ())
        infos = tuple(versions[version][0] for version in sorted(versions))
        return AdapterList(run=run, head=max(versions), versions=infos)

    async def ping(self) -> None:
        return

    async def close(self) -> None:
        self._runs.clear()

    def _find(self, run: str, version: int) -> tuple[AdapterInfo, bytes]:
        versions = self._runs.get(run, {})
        if version not in versions:
            raise not_found(run, version, max(versions, default=None), versions)
        return versions[version]
