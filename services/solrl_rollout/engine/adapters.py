"""Adapters between the store and the engine: validated on the way in, decoded once on the way out."""

import asyncio
from collections import OrderedDict

from solrl_core.adapter import Adapter, adapter_digest, decode_adapter
from solrl_core.errors import AdapterError
from solrl_proto.adapters import AdapterInfo
from solrl_proto.problems import ProblemError, ProblemKind
from solrl_proto.rollouts import AdapterRef

from solrl_rollout.engine.admission import wrong_model
from solrl_rollout.engine.work import Hosted, VersionedAdapter
from solrl_rollout.store import AdapterStore

_DECODED = 8  # kept in memory; a rank-32 FLUX.1 adapter is 150 MB


class Adapters:
    """The hosted models' adapters in `store`."""

    def __init__(self, store: AdapterStore) -> None:
        self._store = store
        self._decoded: OrderedDict[tuple[str, str], Adapter] = OrderedDict()

    async def push(
        self, tenant: str, run: str, version: int, parent: int | None, digest: str, body: bytes, hosted: Hosted
    ) -> tuple[AdapterInfo, bool]:
        """Validate and store a version for a hosted model; also whether it is new.

        Raises:
            ProblemError: 422 `digest-mismatch` or `adapter-…`, 409 and 413 from the store.
        """
        got = await asyncio.to_thread(adapter_digest, body)
        if got != digest:
            raise ProblemError(
                ProblemKind.DIGEST_MISMATCH,
                "the body is not what its Content-Digest says: it was damaged or cut short on the way",
                where="header.Content-Digest",
                got=f"{got}, {len(body)} bytes",
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

    async def fetch(self, tenant: str, ref: AdapterRef, hosted: Hosted) -> VersionedAdapter:
        """A version, decoded.

        Raises:
            ProblemError: 404 for an unknown run or version, 422 `adapter-model`.
        """
        info = await self._store.info(tenant, ref.run, ref.version)
        if info.model != hosted.info.name:
            raise wrong_model(info.model, hosted.info.name)
        adapter = self._decoded.get((hosted.info.name, info.digest))
        if adapter is None:
            info, body = await self._store.get(tenant, ref.run, ref.version)
            adapter = await self._decode(info.digest, body, hosted)
        self._decoded.move_to_end((hosted.info.name, info.digest))
        return VersionedAdapter(info.digest, adapter)

    async def _decode(self, digest: str, body: bytes, hosted: Hosted) -> Adapter:
        try:
            adapter = await asyncio.to_thread(decode_adapter, body, hosted.layout)
        except AdapterError as error:
            raise ProblemError(ProblemKind[f"ADAPTER_{error.fault.upper()}"], error.detail, **error.fields) from error
        self._decoded[hosted.info.name, digest] = adapter
        while len(self._decoded) > _DECODED:
            self._decoded.popitem(last=False)
        return adapter
