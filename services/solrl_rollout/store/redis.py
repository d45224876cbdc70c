"""Adapters in Redis, for all replicas of the service.

Keys of a run, which share the hash tag `{run}` so that Redis Cluster keeps them on one node:

    {prefix}:{run}:versions                        hash: `head`, and a JSON record for each version
    {prefix}:{run}:blob:{version}:{token}:{i}      chunk i of a version's bytes

An upload writes its chunks under a fresh token, with an expiry. Then one script compares the head, makes the
chunks permanent and writes the record that names the token. Chunks of uploads that lose or die expire.
Redis must run with `maxmemory-policy noeviction`; its appendfsync decides what a crash may lose.
"""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from pydantic import ValidationError
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import RedisError
from solrl_proto.adapters import AdapterInfo, AdapterList
from solrl_proto.identifiers import Message
from solrl_proto.problems import ProblemError

from solrl_rollout.store.base import (
    DEFAULT_RETAIN,
    AdapterStore,
    admit,
    corrupt,
    not_found,
    verify_put,
    verify_stored,
)
from solrl_rollout.store.scripts import COMMIT

CHUNK_BYTES = 4 * 2**20
UPLOAD_EXPIRY_S = 600


class Record(Message):
    """What the run's hash holds for a version: the adapter, and where its chunks lie."""

    info: AdapterInfo
    token: str
    chunks: int


class RedisAdapterStore(AdapterStore):
    """Adapters in the Redis at `url` (redis://, rediss://, unix://), under keys that begin with `prefix`."""

    def __init__(self, url: str, retain: int = DEFAULT_RETAIN, prefix: str = "solrl") -> None:
        super().__init__(retain)
        self._prefix = prefix
        try:
            self._redis = Redis.from_url(
                url, retry=Retry(ExponentialBackoff(cap=1.0, base=0.05), 3), socket_timeout=30.0
            )
            pool = self._redis.connection_pool
            # An unknown option in the URL's query is a TypeError that would only come at the first command.
            pool.connection_class(**pool.connection_kwargs)
        except (ValueError, TypeError):
            # The cause is dropped: its text may repeat parts of the URL, and so the password.
            raise ProblemError(
                "store-url",
                500,
                "Adapter store URL is not usable",
                "the Redis URL cannot be parsed",
                expected="redis://[user:password@]host[:port][/database], rediss://… or unix://path",
                action="percent-encode special characters of the password; check port and options",
            ) from None
        options = pool.connection_kwargs
        host, port = options.get("host", "localhost"), options.get("port", 6379)
        self._address: str = options.get("path") or f"{host}:{port}"
        self._commit = self._redis.register_script(COMMIT)

    async def put(self, info: AdapterInfo, body: bytes) -> AdapterInfo:
        await verify_put(info, body)
        with self._reported():
            head, stored = await self._redis.hmget(self._hash(info.run), ["head", str(info.version)])
            same = self._admit(info, head, stored)
            if same is not None:
                return same
            record = Record(info=info, token=secrets.token_hex(8), chunks=-(-len(body) // CHUNK_BYTES))
            chunks = await self._upload(record, body)
            outcome, head, stored = await self._commit(
                keys=[self._hash(info.run), *chunks],
                args=[
                    info.version,
                    "" if info.parent is None else info.parent,
                    record.model_dump_json(),
                    self.retain,
                    self._blobs(info.run),
                ],
            )
        if outcome == b"stored":
            return info
        if outcome == b"refused":
            same = self._admit(info, head or None, stored or None)
            if same is not None:
                return same
        raise self._unavailable(f"the upload took over {UPLOAD_EXPIRY_S} seconds and expired, or was evicted")

    async def get(self, run: str, version: int) -> tuple[AdapterInfo, bytes]:
        record = await self._record(run, version)
        parts: list[bytes] = []
        for i in range(record.chunks):
            with self._reported():
                part = await self._redis.get(self._chunk(record, i))
            if not isinstance(part, bytes):
                # Deleted between two reads because newer versions came (then 404), or truly lost.
                await self._record(run, version)
                raise corrupt(run, version, got=f"chunk {i} is missing", expected=f"{record.chunks} chunks")
            parts.append(part)
        body = b"".join(parts)
        await verify_stored(record.info, body)
        return record.info, body

    async def info(self, run: str, version: int) -> AdapterInfo:
        return (await self._record(run, version)).info

    async def list(self, run: str) -> AdapterList:
        with self._reported():
            fields = await self._redis.hgetall(self._hash(run))
        if not fields:
            raise not_found(run, 0, None, ())
        head = int(fields.pop(b"head"))
        records = (self._parse(run, int(version), fields[version]) for version in sorted(fields, key=int))
        return AdapterList(run=run, head=head, versions=tuple(record.info for record in records))

    async def ping(self) -> None:
        with self._reported():
            await self._redis.ping()

    async def close(self) -> None:
        await self._redis.aclose()

    async def _upload(self, record: Record, body: bytes) -> tuple[str, ...]:
        """Write the chunks, each with an expiry, and return their keys."""
        keys = tuple(self._chunk(record, i) for i in range(record.chunks))
        view = memoryview(body)
        for i, key in enumerate(keys):
            chunk = view[i * CHUNK_BYTES : (i + 1) * CHUNK_BYTES]
            await self._redis.set(key, chunk, ex=UPLOAD_EXPIRY_S)
        return keys

    async def _record(self, run: str, version: int) -> Record:
        with self._reported():
            text = await self._redis.hget(self._hash(run), str(version))
            if text is not None:
                return self._parse(run, version, text)
            fields = await self._redis.hgetall(self._hash(run))
        head = fields.pop(b"head", None)
        raise not_found(run, version, None if head is None else int(head), map(int, fields))

    def _admit(self, info: AdapterInfo, head: bytes | str | None, stored: bytes | str | None) -> AdapterInfo | None:
        known = None if stored is None else self._parse(info.run, info.version, stored).info
        return admit(info, None if head is None else int(head), known)

    def _parse(self, run: str, version: int, text: bytes | str) -> Record:
        try:
            return Record.model_validate_json(text)
        except ValidationError as error:
            raise corrupt(run, version, got=str(error), expected="a version record") from error

    def _hash(self, run: str) -> str:
        return f"{self._prefix}:{{{run}}}:versions"

    def _blobs(self, run: str) -> str:
        return f"{self._prefix}:{{{run}}}:blob"

    def _chunk(self, record: Record, i: int) -> str:
        return f"{self._blobs(record.info.run)}:{record.info.version}:{record.token}:{i}"

    @contextmanager
    def _reported(self) -> Iterator[None]:
        """Turn Redis's errors into the 503 problem."""
        try:
            yield
        except (RedisError, OSError) as error:
            raise self._unavailable(f"{type(error).__name__}: {error}") from error

    def _unavailable(self, fault: str) -> ProblemError:
        return ProblemError(
            "store-unavailable",
            503,
            "Adapter store does not answer",
            f"Redis at {self._address}: {fault}",
            got=self._address,
            expected="a Redis that answers and has memory free",
            action="check that Redis runs, is reachable from here, and accepts writes; then try again",
        )
