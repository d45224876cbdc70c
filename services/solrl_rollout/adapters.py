"""Adapters between the store and the engine: validated on the way in, decoded once on the way out."""

import asyncio
from collections import OrderedDict

from solrl_core.adapter import Adapter, adapter_digest, decode_adapter
from solrl_proto.adapters import AdapterInfo
from solrl_proto.problems import ProblemError
from solrl_proto.rollouts import AdapterRef

from solrl_rollout.refusals import wrong_model
from solrl_rollout.store import AdapterStore
from solrl_rollout.work import Hosted, VersionedAdapter

_DECODED = 8  # kept in memory; a rank-32 FLUX.1 adapter is 150 MB


class Adapters:
    """The hosted model's adapters in `store`."""

    def __init__(self, store: AdapterStore, hosted: Hosted) -> None:
        self._store = store
        self._hosted = hosted
        self._decoded: OrderedDict[str, Adapter] = OrderedDict()

    async def push(
        self, run: str, version: int, parent: int | None, digest: str, body: bytes
    ) -> tuple[AdapterInfo, bool]:
        """Validate and store a version; also whether it is new.

        Raises:
            ProblemError: 422 `digest-mismatch` or `adapter-…`, 409 from the store.
        """
        got = await asyncio.to_thread(adapter_digest, body)
        if got != digest:
            raise ProblemError(
                "digest-mismatch",
                422,
                "Adapter refused",
                "the body is not what its Content-Digest says: it was damaged or cut short on the way",
                where="header.Content-Digest",
                got=f"{got}, {len(body)} bytes",
                expected=digest,
                action="send the file again",
            )
        adapter = await self._decode(digest, body)
        info = AdapterInfo(
            run=run,
            version=version,
            parent=parent,
            model=self._hosted.info.name,
            digest=digest,
            size=len(body),
            modules=len(adapter.modules),
            rank=adapter.rank,
            alpha=adapter.alpha,
        )
        new = not await self._has(run, version)
        return await self._store.put(info, body), new

    async def fetch(self, ref: AdapterRef) -> VersionedAdapter:
        """A version, decoded.

        Raises:
            ProblemError: 404 for an unknown run or version, 422 `adapter-model`.
        """
        info = await self._store.info(ref.run, ref.version)
        if info.model != self._hosted.info.name:
            raise wrong_model(info.model, self._hosted.info.name)
        adapter = self._decoded.get(info.digest)
        if adapter is None:
            info, body = await self._store.get(ref.run, ref.version)
            adapter = await self._decode(info.digest, body)
        self._decoded.move_to_end(info.digest)
        return VersionedAdapter(info.digest, adapter)

    async def _has(self, run: str, version: int) -> bool:
        try:
            await self._store.info(run, version)
        except ProblemError as error:
            if error.problem.status == 404:
                return False
            raise
        return True

    async def _decode(self, digest: str, body: bytes) -> Adapter:
        adapter = await asyncio.to_thread(decode_adapter, body, self._hosted.layout)
        self._decoded[digest] = adapter
        while len(self._decoded) > _DECODED:
            self._decoded.popitem(last=False)
        return adapter
