"""Adapter versions between the store and the engine: validated when pushed, decoded once when served."""

import asyncio
from collections import OrderedDict

from solrl_core.adapter import Adapter, adapter_digest, decode_adapter
from solrl_core.errors import AdapterError
from solrl_proto.adapters import AdapterInfo
from solrl_proto.problems import ProblemError, ProblemKind
from solrl_proto.rollouts import AdapterRef

from solrl_rollout.engine.work import HostedModel, VersionedAdapter
from solrl_rollout.store import RunStore

_CACHED_BYTES = 2**30
"""Bytes of decoded adapters in memory, or only the newest one if it is larger; a rank-32 FLUX.1 adapter has 150 MB."""

_Key = tuple[str, str]
"""A model's name and an adapter's digest."""


class Adapters:
    """The stored adapters of the hosted models, with a cache of decoded ones."""

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self._decoded: OrderedDict[_Key, Adapter] = OrderedDict()
        self._loading: dict[_Key, asyncio.Task[VersionedAdapter]] = {}

    async def push(
        self, tenant: str, run: str, version: int, parent: int | None, digest: str, body: bytes, hosted: HostedModel
    ) -> tuple[AdapterInfo, bool]:
        """Validate and store a version for a hosted model; returns it, and whether it is new.

        Raises:
            ProblemError: 422 `digest-mismatch` or `adapter-…`, 409 and 413 from the store.
        """
        received = await asyncio.to_thread(adapter_digest, body)
        if received != digest:
            raise ProblemError(
                ProblemKind.DIGEST_MISMATCH,
                "the body does not match its Content-Digest: it was damaged or truncated in transit",
                where="header.Content-Digest",
                got=f"{received}, {len(body)} bytes",
                expected=digest,
                action="send the file again",
            )
        adapter = await self._decode(digest, body, hosted)
        info = AdapterInfo(
            run=run,
            version=version,
            parent=parent,
            model=hosted.info.name,
            digest=digest,
            size=len(body),
            modules=len(adapter.modules),
            rank=adapter.rank,
            alpha=adapter.alpha,
        )
        return await self._store.put(tenant, info, body)

    async def fetch(self, tenant: str, ref: AdapterRef, hosted: HostedModel) -> VersionedAdapter:
        """A stored version, decoded.

        Raises:
            ProblemError: 404 for an unknown run or version, 422 `adapter-model`.
        """
        info = await self._store.info(tenant, ref.run, ref.version)
        if info.model != hosted.info.name:
            raise ProblemError(
                ProblemKind.ADAPTER_MODEL,
                f"the adapter was pushed for model {info.model!r}",
                where="body.adapter",
                got=info.model,
                expected=hosted.info.name,
                action="use a version that was pushed for this model",
            )
        key = (hosted.info.name, info.digest)
        while (adapter := self._decoded.get(key)) is None:
            loading = self._loading.get(key)
            if loading is None:
                return await self._load(tenant, ref, hosted, key)
            # An error is reported to the request that began the loading, which may be of another run or tenant.
            await asyncio.wait({loading})
        self._decoded.move_to_end(key)
        return VersionedAdapter(info.digest, adapter)

    async def _load(self, tenant: str, ref: AdapterRef, hosted: HostedModel, key: "_Key") -> VersionedAdapter:
        """Fetch and decode a version; concurrent requests for the same one wait for this."""

        async def load() -> VersionedAdapter:
            # Read again: the run may have been rewound meanwhile, and the version pushed with different content.
            info, body = await self._store.get(tenant, ref.run, ref.version)
            return VersionedAdapter(info.digest, await self._decode(info.digest, body, hosted))

        def loaded(task: asyncio.Task[VersionedAdapter]) -> None:
            del self._loading[key]
            task.cancelled() or task.exception()  # retrieved, in case nobody waits for it any more

        task = self._loading[key] = asyncio.create_task(load())
        task.add_done_callback(loaded)
        # A client that disconnects does not cancel it: others may wait.
        return await asyncio.shield(task)

    async def _decode(self, digest: str, body: bytes, hosted: HostedModel) -> Adapter:
        """Decode a body whose digest was verified; returns the cached adapter if there is one."""
        key = (hosted.info.name, digest)
        if (known := self._decoded.get(key)) is not None:
            self._decoded.move_to_end(key)
            return known
        try:
            adapter = await asyncio.to_thread(decode_adapter, body, hosted.adapter_layout)
        except AdapterError as error:
            raise ProblemError(ProblemKind[f"ADAPTER_{error.fault.upper()}"], error.detail, **error.fields) from error
        self._decoded[key] = adapter
        while len(self._decoded) > 1 and sum(map(_bytes_of, self._decoded.values())) > _CACHED_BYTES:
            self._decoded.popitem(last=False)
        return adapter


def _bytes_of(adapter: Adapter) -> int:
    return sum(tensor.nbytes for tensor in adapter.tensors.values())
