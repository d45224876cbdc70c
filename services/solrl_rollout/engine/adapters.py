"""Adapter versions between the store and the engine: validated when pushed, decoded once when served."""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextlib import ExitStack
from weakref import WeakKeyDictionary, WeakValueDictionary

from solrl_core.adapter import Adapter, decode_adapter
from solrl_core.errors import AdapterError
from solrl_http.limits.bodies import InflightBytes
from solrl_proto.adapters import AdapterInfo, adapter_digest
from solrl_proto.problems import ProblemError, ProblemKind
from solrl_proto.rollouts import AdapterRef

from solrl_rollout.engine.work import HostedModel, LeasedAdapter
from solrl_rollout.store import RunStore

_CACHED_ADAPTERS, _CACHED_BYTES = 16, 2**30
"""Decoded adapters in memory, and their bytes, or only the newest one if it is larger; a rank-32 FLUX.1 adapter has 150
MB. A version that was superseded stays until newer ones fill the cache."""

Content = tuple[str, str]
"""A model's name and an adapter's digest."""
_Key = tuple[str, Content]


class AdapterMemory:
    """Bytes of adapters of accepted requests. Content that several requests of a tenant share counts once."""

    def __init__(self, limit: int, tenant_limit: int) -> None:
        self._budget = InflightBytes(limit, tenant_limit, "adapters", "body.adapter", "max_queued_adapter_bytes")
        self._requests: Counter[_Key] = Counter()

    @property
    def bytes(self) -> int:
        return self._budget.reserved

    def reserve(self, tenant: str, content: Content, size: int) -> Callable[[], None]:
        """Count `content` for one more request of a tenant; returns what ends that, however often it is called.

        Raises:
            Refusal: 503 `too-many-bytes`: there is no room for it.
        """
        key = tenant, content
        if not self._requests[key]:
            self._budget.reserve(tenant, size)
        self._requests[key] += 1
        counted = ExitStack()
        counted.callback(self._end, key, size)
        return counted.close

    def _end(self, key: _Key, size: int) -> None:
        self._requests[key] -= 1
        if not self._requests[key]:
            del self._requests[key]
            self._budget.release(key[0], size)


class Adapters:
    """The stored adapters of the hosted models.

    A content is decoded once for all that hold it. The newest are cached, too.
    """

    def __init__(self, store: RunStore, memory: AdapterMemory) -> None:
        """`memory`: the budget of the adapters that fetchers hold."""
        self._store = store
        self.memory = memory
        self._decoded: WeakValueDictionary[Content, Adapter] = WeakValueDictionary()
        self._files: WeakKeyDictionary[Adapter, bytes] = WeakKeyDictionary()
        self._cached: OrderedDict[Content, Adapter] = OrderedDict()
        self._loading: dict[Content, asyncio.Task[Adapter | None]] = {}

    async def push(
        self, tenant: str, run: str, version: int, parent: int | None, digest: str, body: bytes, hosted: HostedModel
    ) -> tuple[AdapterInfo, bool]:
        """Validate and store a version for a hosted model; returns it, and whether it is new.

        Raises:
            ProblemError: the body has another digest, or is no adapter for the model; `version-conflict`,
                `parent-conflict` or `adapter-quota`.
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

    async def fetch(self, tenant: str, ref: AdapterRef, hosted: HostedModel) -> LeasedAdapter:
        """A stored version, decoded; its bytes count until the result is released.

        Raises:
            ProblemError: the run or version is unknown, or it is another model's.
            Refusal: there is no room for it.
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
        content = (hosted.info.name, info.digest)
        release = self.memory.reserve(tenant, content, info.size)
        try:
            adapter = await self._find(tenant, ref, hosted, content)
        except BaseException:
            release()
            raise
        if adapter is not None:
            return LeasedAdapter(info.digest, adapter, self._files[adapter], release)
        release()
        return await self.fetch(tenant, ref, hosted)

    async def _find(self, tenant: str, ref: AdapterRef, hosted: HostedModel, content: Content) -> Adapter | None:
        """The decoded content; None if the version was deleted and pushed with other content while it loaded."""
        while (adapter := self._look_up(content)) is None:
            loading = self._loading.get(content)
            if loading is None:
                return await self._load(tenant, ref, hosted, content)
            # An error is reported to the request that began the loading, which may be of another run or tenant.
            await asyncio.wait({loading})
        return adapter

    async def _load(self, tenant: str, ref: AdapterRef, hosted: HostedModel, content: Content) -> Adapter | None:
        """Fetch and decode a version; concurrent requests for the same one wait for this."""

        async def load() -> Adapter | None:
            info, body = await self._store.get(tenant, ref.run, ref.version)
            return await self._decode(info.digest, body, hosted) if info.digest == content[1] else None

        def loaded(task: asyncio.Task[Adapter | None]) -> None:
            del self._loading[content]
            task.cancelled() or task.exception()  # retrieved, in case every waiting request was cancelled

        task = self._loading[content] = asyncio.create_task(load())
        task.add_done_callback(loaded)
        # A client that disconnects does not cancel the task: other requests may wait for it.
        return await asyncio.shield(task)

    async def _decode(self, digest: str, body: bytes, hosted: HostedModel) -> Adapter:
        """Decode a body whose digest was verified, or return what was decoded before."""
        content = (hosted.info.name, digest)
        if (decoded := self._look_up(content)) is not None:
            return decoded
        try:
            adapter = await asyncio.to_thread(decode_adapter, body, hosted.adapter_layout)
        except AdapterError as error:
            raise ProblemError(ProblemKind[f"ADAPTER_{error.fault.upper()}"], error.detail, **error.fields) from error
        self._files[adapter] = body
        self._cached[content] = self._decoded[content] = adapter
        while len(self._cached) > 1 and (
            len(self._cached) > _CACHED_ADAPTERS
            or sum(tensor.nbytes for lora in self._cached.values() for tensor in lora.tensors.values()) > _CACHED_BYTES
        ):
            self._cached.popitem(last=False)
        return adapter

    def _look_up(self, content: Content) -> Adapter | None:
        if content in self._cached:
            self._cached.move_to_end(content)
        return self._decoded.get(content)
