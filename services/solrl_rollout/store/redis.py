"""A run store in Redis, for all replicas of the service.

Keys of a tenant, which share the hash tag `{tenant}` so that Redis Cluster keeps them on one node:

    {prefix}:{tenant}:runs                               set of run names
    {prefix}:{tenant}:bytes                              bytes of their versions
    {prefix}:{tenant}:revision                           revision of the last reported iteration
    {prefix}:{tenant}:run:{run}:versions                 hash: `head`, and a JSON record for each version
    {prefix}:{tenant}:run:{run}:pins                     set of versions
    {prefix}:{tenant}:run:{run}:iterations               sorted set of JSON points, by iteration
    {prefix}:{tenant}:run:{run}:progress                 hash: `revision`, `last`, `samples`, `sampled`, bytes `held`
    {prefix}:{tenant}:run:{run}:activity                 JSON of the progress within an iteration, which expires
    {prefix}:{tenant}:run:{run}:blob:{version}:{token}:{i}   chunk i of a version's bytes

An upload writes its chunks under a fresh token, with an expiry. Then one script compares the head, makes the
chunks permanent and writes the record that names the token. Chunks of refused or interrupted uploads expire.

A key that has a value of another type, which only another program can have written, counts as absent: reading it logs
it, and the next write begins it anew. So a run whose hash is damaged has lost its versions, and is pushed again.

Redis must run with `maxmemory-policy noeviction`. Its appendfsync determines how much a crash may lose. If the server
has WAITAOF (7.2), every acknowledgement of a version, the first and any later one, waits until it is on disk.
"""

import asyncio
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import RedisError, ResponseError
from solrl_proto.adapters import AdapterInfo, AdapterList, RunList
from solrl_proto.problems import ProblemError, ProblemKind
from solrl_proto.secrets import hold_secret
from solrl_proto.status import Activity, IterationReport, Point, Samples

from solrl_rollout.store.base import (
    DEFAULT_RETAIN,
    KEPT_ACTIVITY_S,
    KEPT_POINT_BYTES,
    KEPT_POINTS,
    Progress,
    RunStore,
    admit,
    corrupt,
    corrupt_run,
    encode_point,
    head_conflict,
    not_found,
    over_quota,
    verify_stored,
)
from solrl_rollout.store.readable import (
    DAMAGED,
    Damage,
    Record,
    fault_of,
    head_of,
    number,
    numbers,
    of_another_type,
    version_record,
)
from solrl_rollout.store.scripts import AGAIN, COMMIT, DELETE, PIN, REWIND, SWEEP, TELL

CHUNK_BYTES = 4 * 2**20
UPLOAD_EXPIRY_S = 600
WAITAOF_MS = 10_000
CONNECTIONS = 64
"""Maximum number of connections to Redis; further commands wait."""
WAIT_S = 30.0
"""Seconds that a command waits for a connection."""
_PARSED_AT_ONCE = 256  # points; some milliseconds


@dataclass(frozen=True)
class Keys:
    """Names of a run's keys; `prefix` contains the tenant's hash tag."""

    prefix: str
    run: str

    @property
    def runs(self) -> str:
        """The tenant's run names."""
        return f"{self.prefix}:runs"

    @property
    def bytes(self) -> str:
        """Bytes of the tenant's versions."""
        return f"{self.prefix}:bytes"

    @property
    def revision(self) -> str:
        """The tenant's newest revision."""
        return f"{self.prefix}:revision"

    @property
    def versions(self) -> str:
        """The run's head and records."""
        return f"{self.prefix}:run:{self.run}:versions"

    @property
    def pins(self) -> str:
        """The run's pinned versions."""
        return f"{self.prefix}:run:{self.run}:pins"

    @property
    def iterations(self) -> str:
        """The run's points."""
        return f"{self.prefix}:run:{self.run}:iterations"

    @property
    def progress(self) -> str:
        """The run's revision, last point and newest samples."""
        return f"{self.prefix}:run:{self.run}:progress"

    @property
    def activity(self) -> str:
        """The run's progress within an iteration."""
        return f"{self.prefix}:run:{self.run}:activity"

    @property
    def blobs(self) -> str:
        """Prefix of all chunks of the run."""
        return f"{self.prefix}:run:{self.run}:blob"

    def chunk(self, record: Record, i: int) -> str:
        """Chunk i of a version."""
        return f"{self.blobs}:{record.info.version}:{record.token}:{i}"


CHECKED_SETTINGS = ("maxmemory", "maxmemory-policy", "appendonly", "appendfsync")


def weaknesses(settings: Mapping[str, object]) -> Iterator[str]:
    """Settings among `CHECKED_SETTINGS` that risk losing adapters; each with its remedy after the last semicolon."""
    if settings["maxmemory"] != "0" and settings["maxmemory-policy"] != "noeviction":
        policy = settings["maxmemory-policy"]
        yield f"Redis has maxmemory-policy {policy}, which may evict adapters; set it to noeviction"
    if settings["appendonly"] != "yes":
        yield "Redis keeps no append-only file: a restart loses versions, which trainers push again; set appendonly yes"
    elif settings["appendfsync"] == "no":
        yield "Redis leaves appendfsync to the system: a crash may lose half a minute; set it to everysec or always"


class RedisRunStore(RunStore):
    """Run store in the Redis at `url` (redis://, rediss://, unix://), under keys that begin with `prefix`."""

    def __init__(self, url: str, retain: int = DEFAULT_RETAIN, quota: int | None = None, prefix: str = "solrl") -> None:
        super().__init__(retain, quota)
        self._prefix = prefix
        try:
            pool = BlockingConnectionPool.from_url(
                url,
                max_connections=CONNECTIONS,
                timeout=WAIT_S,
                retry=Retry(ExponentialBackoff(cap=1.0, base=0.05), 3),
                socket_timeout=30.0,
            )
            hold_secret(pool.connection_kwargs.get("password") or "")
            self._redis = Redis.from_pool(pool)
            # An unknown option in the URL's query would raise a TypeError only at the first command.
            pool.connection_class(**pool.connection_kwargs)
        except (ValueError, TypeError):
            # Without the cause: its text may contain parts of the URL, including the password.
            raise ProblemError(
                ProblemKind.STORE_URL,
                "the Redis URL cannot be parsed",
                expected="redis://[user:password@]host[:port][/database], rediss://… or unix://path",
                action="percent-encode special characters of the password; check port and options",
            ) from None
        options = pool.connection_kwargs
        host, port = options.get("host", "localhost"), options.get("port", 6379)
        self._address: str = options.get("path") or f"{host}:{port}"
        self._delete = self._redis.register_script(DELETE)
        self._pin = self._redis.register_script(PIN)
        self._tell = self._redis.register_script(TELL)
        self._sweep_some = self._redis.register_script(SWEEP)
        self._durable: bool | None = None
        self._damage = Damage()

    async def put(self, tenant: str, info: AdapterInfo, body: bytes) -> tuple[AdapterInfo, bool]:
        keys = self._keys(tenant, info.run)
        with self._reported():
            await self._sweep(keys)
            head, stored = await self._fields(keys, "head", str(info.version))
            same = self._admit(info, head, stored)
            if same is not None:
                await self._written(keys, info.version, stored)
                return same, False
            record = Record(info=info, token=secrets.token_hex(8), chunks=-(-len(body) // CHUNK_BYTES))
            chunks = await self._upload(keys, record, body)
            arguments = [
                info.version,
                "" if info.parent is None else info.parent,
                record.model_dump_json(),
                info.size,
                self.retain,
                "" if self.quota is None else self.quota,
                info.run,
                keys.blobs,
            ]
            (outcome, found, stored), written = await self._run_script(
                COMMIT, [keys.versions, keys.pins, keys.runs, keys.bytes, *chunks], arguments
            )
            if outcome == b"stored":
                self._require(written)
                return info, True
            await self._redis.unlink(*chunks)
        if outcome == b"quota" and self.quota is not None:
            raise over_quota(info.run, info.version, f"{int(found)} bytes with this one", self.quota)
        if outcome == b"refused":
            same = self._admit(info, found or None, stored or None)
            if same is not None:
                await self._written(keys, info.version, stored)
                return same, False
        raise self._unavailable(f"the upload took over {UPLOAD_EXPIRY_S} seconds and expired, or was evicted")

    async def get(self, tenant: str, run: str, version: int) -> tuple[AdapterInfo, bytes]:
        keys = self._keys(tenant, run)
        record = await self._record(keys, run, version)
        while (body := await self._download(keys, record)) is None:
            # Since then deleted by newer versions (404), pushed again, or lost.
            before, record = record, await self._record(keys, run, version)
            if record == before:
                raise corrupt(run, version, got="a part of it is missing", expected=f"{record.chunks} chunks")
        await verify_stored(record.info, body)
        return record.info, body

    async def info(self, tenant: str, run: str, version: int) -> AdapterInfo:
        return (await self._record(self._keys(tenant, run), run, version)).info

    async def head(self, tenant: str, run: str) -> int | None:
        (head,) = await self._fields(self._keys(tenant, run), "head")
        return head_of(run, head)

    async def list(self, tenant: str, run: str) -> AdapterList:
        keys = self._keys(tenant, run)
        fields, pins = await self._replies([("HGETALL", keys.versions), ("SMEMBERS", keys.pins)])
        if not fields or fields is DAMAGED:
            raise not_found(run, 0, None, ())
        head, infos = head_of(run, fields.get(b"head")), tuple(self._damage.versions(run, fields))
        if head is None or not infos:
            raise corrupt_run(run, got="no head, or no version that can be read", expected="a head and versions")
        return AdapterList(run=run, head=head, pinned=tuple(numbers(() if pins is DAMAGED else pins)), versions=infos)

    async def runs(self, tenant: str) -> RunList:
        keys = self._keys(tenant, "")
        names, held = await self._replies([("SMEMBERS", keys.runs), ("GET", keys.bytes)], consistent=True)
        listed = []
        for name in self._damage.names(() if names is DAMAGED else names):
            try:
                listed.append(await self.list(tenant, name))
            except ProblemError as error:
                if error.problem.kind == ProblemKind.ADAPTER_CORRUPT:
                    self._damage.name(f"run {name!r}", error.problem.got)
                elif error.problem.status != 404:  # the run has been deleted since
                    raise
        size = 0 if held is None else number(held)
        if size is None:
            self._damage.name(f"the number of bytes of tenant {tenant!r}", held)
            size = sum(info.size for run in listed for info in run.versions)
        return RunList(runs=tuple(listed), size=size, quota=self.quota)

    async def pin(self, tenant: str, run: str, version: int, pinned: bool) -> None:
        keys = self._keys(tenant, run)
        with self._reported():
            found = await self._pin(keys=[keys.versions, keys.pins], args=[version, int(pinned)])
        if not found:
            await self._record(keys, run, version)

    async def rewind(self, tenant: str, run: str, version: int, head: int) -> None:
        keys = self._keys(tenant, run)
        with self._reported():
            found, written = await self._run_script(
                REWIND, [keys.versions, keys.pins, keys.bytes], [version, head, keys.blobs]
            )
        if not found:
            raise not_found(run, version, *await self._held(keys))
        if (now := head_of(run, found)) is not None and now != version:
            raise head_conflict(run, version, head, now)
        self._require(written)

    async def delete(self, tenant: str, run: str) -> None:
        keys = self._keys(tenant, run)
        with self._reported():
            await self._sweep(keys)
            deleted = await self._delete(
                keys=[keys.versions, keys.pins, keys.runs, keys.bytes, keys.iterations, keys.progress, keys.activity],
                args=[run, keys.blobs],
            )
        if not deleted:
            raise not_found(run, 0, None, ())

    async def add_iteration(self, tenant: str, run: str, report: IterationReport) -> int:
        keys, samples = self._keys(tenant, run), report.samples
        point = encode_point(report)
        told = (samples.model_dump_json(), samples.iteration) if samples else ("", "")
        with self._reported():
            revision = await self._tell(
                keys=[keys.versions, keys.iterations, keys.progress, keys.revision],
                args=[report.iteration, point, *told, KEPT_POINTS, KEPT_POINT_BYTES],
            )
        if not revision:
            raise not_found(run, 0, None, ())
        return int(revision)

    async def iterations(self, tenant: str, run: str) -> tuple[Point, ...]:
        keys = self._keys(tenant, run)
        texts, known = await self._replies([("ZRANGE", keys.iterations, "0", "-1"), ("EXISTS", keys.versions)])
        if not texts and not known:
            raise not_found(run, 0, None, ())
        texts = () if texts is DAMAGED else texts
        points: list[Point] = []
        for start in range(0, len(texts), _PARSED_AT_ONCE):
            await asyncio.sleep(0)  # let other requests proceed between parts
            points += self._damage.points(run, texts[start : start + _PARSED_AT_ONCE])
        return tuple(points)

    async def samples(self, tenant: str, run: str) -> Samples | None:
        (text,) = await self._replies([("HGET", self._keys(tenant, run).progress, "samples")])
        return None if text in (None, DAMAGED) else self._damage.message(f"the samples of run {run!r}", Samples, text)

    async def progress(self, tenant: str, runs: Sequence[str]) -> dict[str, Progress]:
        asked = [("HMGET", self._keys(tenant, run).progress, "revision", "last") for run in runs]
        found: dict[str, Progress] = {}
        for run, reply in zip(runs, await self._replies(asked, consistent=True), strict=True):
            at, last = (None, None) if reply is DAMAGED else reply
            if at is None:
                continue
            place = f"the progress of run {run!r}"
            revision, point = number(at), self._damage.message(place, Point, last or b"")
            if revision is None:
                self._damage.name(place, at)
            elif point is not None:
                found[run] = Progress(revision, point)
        return found

    async def set_activity(self, tenant: str, run: str, activity: Activity) -> None:
        if await self.head(tenant, run) is None:
            raise not_found(run, 0, None, ())
        with self._reported():
            await self._redis.set(self._keys(tenant, run).activity, activity.model_dump_json(), ex=KEPT_ACTIVITY_S)

    async def activities(self, tenant: str, runs: Sequence[str]) -> dict[str, Activity]:
        replies = await self._replies([("GET", self._keys(tenant, run).activity) for run in runs])
        held = {run: text for run, text in zip(runs, replies, strict=True) if text not in (None, DAMAGED)}
        found = {run: self._damage.message(f"the activity of run {run!r}", Activity, held[run]) for run in held}
        return {run: one for run, one in found.items() if one is not None}

    async def ping(self) -> None:
        with self._reported():
            await self._redis.ping()

    async def warnings(self) -> tuple[str, ...]:
        with self._reported():
            try:
                held = await self._redis.config_get(*CHECKED_SETTINGS)
            except ResponseError:
                return ("Redis hides its settings (CONFIG is forbidden); make sure of noeviction and appendonly yes",)
            return tuple(weaknesses({str(name): value for name, value in held.items()}))

    async def close(self) -> None:
        await self._redis.aclose()

    async def _upload(self, keys: "Keys", record: Record, body: bytes) -> tuple[str, ...]:
        """Write the chunks, each with an expiry, and return their keys. A failure leaves none behind."""
        chunks = tuple(keys.chunk(record, i) for i in range(record.chunks))
        view = memoryview(body)
        try:
            for i, key in enumerate(chunks):
                chunk = view[i * CHUNK_BYTES : (i + 1) * CHUNK_BYTES]
                await self._redis.set(key, chunk, ex=UPLOAD_EXPIRY_S)
        except (RedisError, OSError, asyncio.CancelledError):
            with suppress(RedisError, OSError):  # they expire
                await self._redis.unlink(*chunks)
            raise
        return chunks

    async def _download(self, keys: "Keys", record: Record) -> bytes | None:
        """Content of the chunks; None if one is missing."""
        parts: list[bytes] = []
        for i in range(record.chunks):
            (part,) = await self._replies([("GET", keys.chunk(record, i))])
            if not isinstance(part, bytes):
                return None
            parts.append(part)
        return b"".join(parts)

    async def _run_script(self, script: str, keys: Sequence[str], arguments: Sequence[Any]) -> tuple[Any, bool]:
        """A script's answer, and whether its writes are on the server's disk; True if the server cannot tell."""
        durable = await self._keeps_a_file()
        # One pipeline, sent again as a whole if its connection breaks: WAITAOF waits for its own connection's writes.
        # The script itself rather than its digest, which a restarted Redis does not know.
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.eval(script, len(keys), *keys, *arguments)
            if durable:
                pipe.waitaof(1, 0, WAITAOF_MS)
            answer, *waited = await pipe.execute()
        return answer, not waited or bool(waited[0][0])

    async def _written(self, keys: "Keys", version: int, record: bytes | str | None) -> None:
        """Return once a stored version is on the server's disk: the push that stored it may have failed to wait."""
        with self._reported():
            if await self._keeps_a_file():
                # WAITAOF returns immediately on a connection that wrote nothing.
                _, written = await self._run_script(AGAIN, [keys.versions], [version, record])
                self._require(written)

    def _require(self, written: bool) -> None:
        if not written:
            raise self._unavailable(f"it did not write the version to disk within {WAITAOF_MS} ms")

    async def _keeps_a_file(self) -> bool:
        """Whether the server has an append-only file and can tell when it is written."""
        if self._durable is None:
            version = (await self._redis.info("server"))["redis_version"]
            persistence = await self._redis.info("persistence")
            new = tuple(map(int, version.split(".")[:2])) >= (7, 2)
            self._durable = new and bool(persistence["aof_enabled"])
        return self._durable

    async def _replies(self, commands: Sequence[tuple[str, ...]], *, consistent: bool = False) -> Sequence[Any]:
        """Replies of commands that read; `DAMAGED` for a key with a value of another type.

        `consistent`: from one view of the store. A Redis without free memory refuses that.
        """
        with self._reported():
            async with self._redis.pipeline(transaction=consistent) as asked:
                for command in commands:
                    asked.execute_command(*command)
                replies = await asked.execute(raise_on_error=False)
            return [self._unless_damaged(*one) for one in zip(commands, replies, strict=True)]

    async def _fields(self, keys: "Keys", *names: str) -> Sequence[Any]:
        """Fields of a run's hash; none if its key has a value of another type: then the run's versions are lost."""
        (found,) = await self._replies([("HMGET", keys.versions, *names)])
        return [None] * len(names) if found is DAMAGED else found

    async def _sweep(self, keys: "Keys") -> None:
        """Delete the chunks of a run whose hash has a value of another type, so that they take no memory and quota."""
        damaged = [keys.versions, keys.bytes]
        if not await self._sweep_some(keys=damaged):
            return
        async for chunk in self._redis.scan_iter(f"{keys.blobs}:*"):
            await self._sweep_some(keys=[*damaged, chunk])

    def _unless_damaged(self, command: Sequence[str], reply: Any) -> Any:
        if not isinstance(reply, Exception):
            return reply
        if not of_another_type(reply):
            raise reply
        self._damage.name(f"the key {command[1]!r}", reply)
        return DAMAGED

    async def _record(self, keys: "Keys", run: str, version: int) -> Record:
        (text,) = await self._fields(keys, str(version))
        if text is not None:
            return version_record(run, version, text)
        raise not_found(run, version, *await self._held(keys))

    async def _held(self, keys: "Keys") -> tuple[int | None, Sequence[int]]:
        """A run's head and its versions."""
        (fields,) = await self._replies([("HGETALL", keys.versions)])
        if fields is DAMAGED:
            return None, ()
        return head_of(keys.run, fields.get(b"head")), numbers(fields)

    def _admit(self, info: AdapterInfo, head: bytes | str | None, stored: bytes | str | None) -> AdapterInfo | None:
        known = None if stored is None else version_record(info.run, info.version, stored).info
        return admit(info, head_of(info.run, head), known)

    def _keys(self, tenant: str, run: str) -> "Keys":
        return Keys(f"{self._prefix}:{{{tenant}}}", run)

    @contextmanager
    def _reported(self) -> Iterator[None]:
        """Convert errors of Redis to the 503 problem."""
        try:
            yield
        except (RedisError, OSError) as error:
            raise self._unavailable(f"{type(error).__name__}: {fault_of(error)}") from error

    def _unavailable(self, fault: str) -> ProblemError:
        return ProblemError(
            ProblemKind.STORE_UNAVAILABLE,
            f"Redis at {self._address}: {fault}",
            got=self._address,
            expected="a Redis that answers and has memory free",
            action="check that Redis runs, is reachable from here, and accepts writes; then try again",
        )
