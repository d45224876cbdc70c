"""A run store in Redis, for all replicas of the service.

Keys of a tenant, which share the hash tag `{tenant}` so that Redis Cluster keeps them on one node:

    solrl:{tenant}:runs                               set of run names
    solrl:{tenant}:bytes                              hash: the bytes of each run's versions
    solrl:{tenant}:revision                           revision of the last reported iteration
    solrl:{tenant}:run:{run}:versions                 hash: `head`, and a JSON record for each version
    solrl:{tenant}:run:{run}:iterations               sorted set of JSON points, by iteration
    solrl:{tenant}:run:{run}:progress                 hash: `revision`, `last`, `samples`, `sampled`, bytes `held`
    solrl:{tenant}:run:{run}:blob:{version}           a version's bytes
    solrl:{tenant}:run:{run}:upload:{id}              bytes of a push under way, which expire

What is damaged is logged and omitted, so that it does not hide other runs; only a request for the damaged run gets an
error. Unknown fields are ignored: replicas that share a store may have different versions.

A push uploads its bytes; then one script compares the head, renames them, and writes the record: a script's arguments
are copied several times while Redis serves nobody else. Redis must run with `maxmemory-policy noeviction`. Its
appendfsync determines how much a crash may lose; trainers push lost versions again.
"""

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import OutOfMemoryError, RedisError
from solrl_proto.adapters import AdapterInfo, AdapterList, RunList
from solrl_proto.identifiers import Message
from solrl_proto.secrets import register_secret
from solrl_proto.status import IterationReport, Point, Samples

from solrl_rollout.store.errors import (
    CorruptError,
    RunNotFoundError,
    StoreUnavailableError,
    StoreUrlError,
    head_conflict,
    not_found,
    quota_exceeded,
)
from solrl_rollout.store.run_store import (
    DEFAULT_RETAIN,
    KEPT_POINT_BYTES,
    KEPT_POINTS,
    Progress,
    RunStore,
    admit,
    encode_point,
)
from solrl_rollout.store.scripts import COMMIT, DELETE, PROBE, REPORT, REWIND

logger = logging.getLogger(__name__)

CONNECTIONS = 64
"""Maximum number of connections to Redis; further commands wait."""
WAIT_S = 30.0
"""Seconds that a command waits for a connection."""
UPLOAD_S = 600
"""Seconds until the bytes of a push that was cut off are deleted."""
_MOST_DIGITS = 16
"""Most digits of versions and revisions, which are below 2**53."""
_PARSED_AT_ONCE = 256  # points; some milliseconds
_POINTS: TypeAdapter[tuple[Point, ...]] = TypeAdapter(tuple[Point, ...])
_SHOWN = 200

Model = TypeVar("Model", bound=Message)


class Keys:
    """Names of a run's keys, and of its tenant's; see above. `blobs` is a prefix."""

    def __init__(self, tenant: str, run: str) -> None:
        prefix, self.run = f"solrl:{{{tenant}}}", run
        self.runs, self.bytes, self.revision = f"{prefix}:runs", f"{prefix}:bytes", f"{prefix}:revision"
        of_run = f"{prefix}:run:{run}"
        self.versions, self.blobs = f"{of_run}:versions", f"{of_run}:blob"
        self.upload = f"{of_run}:upload:{secrets.token_hex(8)}"
        self.iterations, self.progress = f"{of_run}:iterations", f"{of_run}:progress"


class RedisRunStore(RunStore):
    """Run store in the Redis at `url` (redis://, rediss://, unix://)."""

    def __init__(self, url: str, retain: int = DEFAULT_RETAIN, quota: int | None = None) -> None:
        super().__init__(retain, quota)
        try:
            pool = BlockingConnectionPool.from_url(
                url,
                max_connections=CONNECTIONS,
                timeout=WAIT_S,
                retry=Retry(ExponentialBackoff(cap=1.0, base=0.05), 3),
                socket_timeout=30.0,
            )
            register_secret(pool.connection_kwargs.get("password") or "")
            self._redis = Redis.from_pool(pool)
            # An unknown option in the URL's query would raise a TypeError only at the first command.
            pool.connection_class(**pool.connection_kwargs)
        except (ValueError, TypeError):
            # Without the cause: its text may contain parts of the URL, including the password.
            raise StoreUrlError(
                "the Redis URL cannot be parsed; expected redis://[user:password@]host[:port][/database], rediss://… "
                "or unix://path; percent-encode special characters of the password, and check port and options"
            ) from None
        options = pool.connection_kwargs
        host, port = options.get("host", "localhost"), options.get("port", 6379)
        self._address: str = options.get("path") or f"{host}:{port}"
        script = self._redis.register_script
        self._commit, self._rewind, self._delete = script(COMMIT), script(REWIND), script(DELETE)
        self._report, self._probe = script(REPORT), script(PROBE)

    async def put(self, tenant: str, info: AdapterInfo, body: bytes) -> tuple[AdapterInfo, bool]:
        keys = Keys(tenant, info.run)
        arguments = [
            info.version,
            "" if info.parent is None else info.parent,
            info.model_dump_json(),
            self.retain,
            "" if self.quota is None else self.quota,
            info.run,
            keys.blobs,
        ]
        with self._reported():
            await self._redis.set(keys.upload, body, ex=UPLOAD_S)
            places = [keys.versions, keys.runs, keys.bytes, keys.upload]
            outcome, *details = await self._commit(keys=places, args=arguments)
        if outcome == b"lost":
            raise StoreUnavailableError(self._address, "it lost the bytes of a push before they were stored")
        if outcome == b"quota" and self.quota is not None:
            raise quota_exceeded(info.run, info.version, details[0], self.quota)
        if outcome == b"refused":
            head, stored = details
            existing = info_of(info.run, info.version, stored) if stored else None
            stored_info = admit(info, head_of(info.run, head), existing)
            assert stored_info is not None
            return stored_info, False
        return info, True

    async def get(self, tenant: str, run: str, version: int) -> tuple[AdapterInfo, bytes]:
        info = await self.info(tenant, run, version)
        while True:
            (body,) = await self._replies(("GET", f"{Keys(tenant, run).blobs}:{version}"))
            # In a thread: a FLUX.1 adapter takes more than a tenth of a second, too long for the event loop.
            digest = f"sha256:{(await asyncio.to_thread(hashlib.sha256, body or b'')).hexdigest()}"
            if body is not None and digest == info.digest:
                return info, body
            # Since then deleted by newer versions, pushed again, or damaged.
            before, info = info, await self.info(tenant, run, version)
            if info == before:
                got = "its bytes are missing" if body is None else digest
                raise CorruptError(run, version, got=got, expected=info.digest)

    async def info(self, tenant: str, run: str, version: int) -> AdapterInfo:
        keys = Keys(tenant, run)
        ((text,),) = await self._replies(("HMGET", keys.versions, str(version)))
        if text is None:
            raise await self._missing(keys, version)
        return info_of(run, version, text)

    async def head(self, tenant: str, run: str) -> int | None:
        (head,) = await self._replies(("HGET", Keys(tenant, run).versions, "head"))
        return head_of(run, head)

    async def list(self, tenant: str, run: str) -> AdapterList:
        (fields,) = await self._replies(("HGETALL", Keys(tenant, run).versions))
        return _listed(run, fields)

    async def runs(self, tenant: str) -> RunList:
        (names,) = await self._replies(("SMEMBERS", Keys(tenant, "").runs))
        runs, listed = sorted(name.decode(errors="replace") for name in names), []
        replies = await self._replies(*(("HGETALL", Keys(tenant, run).versions) for run in runs))
        for run, fields in zip(runs, replies, strict=True):
            try:
                listed.append(_listed(run, fields))
            except CorruptError as error:
                log_damage(f"run {run!r}", str(error.problem.got))
            except RunNotFoundError:
                pass  # deleted since
        size = sum(info.size for run in listed for info in run.versions)
        return RunList(runs=tuple(listed), size=size, quota=self.quota)

    async def sizes(self) -> dict[str, int]:
        before, after = "solrl:{", "}:bytes"
        with self._reported():
            keys = [
                key.decode(errors="replace") async for key in self._redis.scan_iter(f"{before}*{after}", count=1000)
            ]
        return {
            key.removeprefix(before).removesuffix(after): sum(number(value) or 0 for value in values)
            for key, values in zip(keys, await self._replies(*(("HVALS", key) for key in keys)), strict=True)
        }

    async def rewind(self, tenant: str, run: str, version: int, head: int) -> None:
        keys = Keys(tenant, run)
        with self._reported():
            places = [keys.versions, keys.bytes]
            stored_head = await self._rewind(keys=places, args=[version, head, keys.blobs, run])
        if not stored_head:
            raise await self._missing(keys, version)
        if (now := head_of(run, stored_head)) is not None and now != version:
            raise head_conflict(run, version, head, now)

    async def delete(self, tenant: str, run: str) -> None:
        keys = Keys(tenant, run)
        with self._reported():
            deleted = await self._delete(
                keys=[keys.runs, keys.bytes, keys.versions, keys.iterations, keys.progress],
                args=[run, keys.blobs],
            )
        if not deleted:
            raise RunNotFoundError(run)

    async def add_iteration(self, tenant: str, run: str, report: IterationReport) -> int:
        keys, samples = Keys(tenant, run), report.samples
        point = encode_point(report)
        sample_fields = (samples.model_dump_json(), samples.iteration) if samples else ("", "")
        with self._reported():
            revision = await self._report(
                keys=[keys.versions, keys.iterations, keys.progress, keys.revision],
                args=[report.iteration, point, *sample_fields, KEPT_POINTS, KEPT_POINT_BYTES],
            )
        if not revision:
            raise RunNotFoundError(run)
        return int(revision)

    async def iterations(self, tenant: str, run: str) -> tuple[Point, ...]:
        keys = Keys(tenant, run)
        texts, exists = await self._replies(("ZRANGE", keys.iterations, "0", "-1"), ("EXISTS", keys.versions))
        if not texts and not exists:
            raise RunNotFoundError(run)
        points: list[Point] = []
        for start in range(0, len(texts), _PARSED_AT_ONCE):
            await asyncio.sleep(0)  # let other requests proceed between parts
            points += points_of(run, texts[start : start + _PARSED_AT_ONCE])
        return tuple(points)

    async def samples(self, tenant: str, run: str) -> Samples | None:
        (text,) = await self._replies(("HGET", Keys(tenant, run).progress, "samples"))
        return parse_or_none(f"the samples of run {run!r}", Samples, text)

    async def progress(self, tenant: str, runs: Sequence[str]) -> dict[str, Progress]:
        commands = [("HMGET", Keys(tenant, run).progress, "revision", "last") for run in runs]
        progress: dict[str, Progress] = {}
        for run, (at, last) in zip(runs, await self._replies(*commands, consistent=True), strict=True):
            place = f"the progress of run {run!r}"
            point = parse_or_none(place, Point, last)
            if point is None:
                continue
            if (revision := number(at or b"")) is None:
                log_damage(place, f"its revision is {at!r}")
            else:
                progress[run] = Progress(revision, point)
        return progress

    async def ping(self) -> None:
        with self._reported():
            await self._probe(keys=["solrl:probe"])

    async def close(self) -> None:
        await self._redis.aclose()

    async def _missing(self, keys: Keys, version: int) -> Exception:
        (fields,) = await self._replies(("HGETALL", keys.versions))
        return not_found(keys.run, version, head_of(keys.run, fields.get(b"head")), numbers(fields))

    async def _replies(self, *commands: tuple[str, ...], consistent: bool = False) -> Sequence[Any]:
        """Replies of commands that read; `consistent`: of one moment, which a Redis without free memory refuses."""
        with self._reported():
            async with self._redis.pipeline(transaction=consistent) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)
                return await pipeline.execute()

    @contextmanager
    def _reported(self) -> Iterator[None]:
        """Raise errors of Redis as StoreUnavailableError."""
        try:
            yield
        except OutOfMemoryError as error:
            raise StoreUnavailableError(self._address, "it has reached its maxmemory", full=True) from error
        except (RedisError, OSError) as error:
            # Without the commands of the pipeline, which may hold a whole script.
            fault = str(error).rpartition("caused error: ")[2].strip("(',)")
            raise StoreUnavailableError(self._address, f"{type(error).__name__}: {fault}") from error


def _listed(run: str, fields: dict[bytes, bytes]) -> AdapterList:
    if not fields:
        raise RunNotFoundError(run)
    head, infos = head_of(run, fields.get(b"head")), tuple(versions_of(run, fields))
    if head is None or not infos:
        raise CorruptError(run, None, got="no head, or no version that can be read", expected="a head and versions")
    return AdapterList(run=run, head=head, versions=infos)


@lru_cache(1024)
def log_damage(place: str, fault: str) -> None:
    """Log the fault of a damaged record; once, however often it is read."""
    logger.warning("%s is damaged in the store, and omitted: %r", place, fault[:_SHOWN])


def parse_or_none(place: str, model: type[Model], text: bytes | None) -> Model | None:
    """The message of a JSON record; None if there is none, or it is damaged."""
    if text is None:
        return None
    try:
        return model.model_validate_json(text, extra="ignore")
    except ValidationError as error:
        log_damage(place, str(error))
        return None


def points_of(run: str, texts: Sequence[bytes]) -> tuple[Point, ...]:
    """A run's iterations without damaged ones."""
    try:
        return _POINTS.validate_json(b"[" + b",".join(texts) + b"]", extra="ignore")
    except ValidationError:
        points = (parse_or_none(f"an iteration of run {run!r}", Point, text) for text in texts)
        return tuple(point for point in points if point is not None)


def versions_of(run: str, fields: Mapping[bytes, bytes]) -> Iterator[AdapterInfo]:
    """The versions among the fields of a run's hash, oldest first, without damaged ones."""
    for version in numbers(fields):
        try:
            yield info_of(run, version, fields[b"%d" % version])
        except CorruptError as error:
            log_damage(f"version {version} of run {run!r}", str(error.problem.got))


def number(text: bytes) -> int | None:
    """The version or revision that a text is; None if it is none, or is written in another way."""
    if not text.isdigit() or len(text) > _MOST_DIGITS:
        return None
    value = int(text)
    return value if value < 2**53 and text == b"%d" % value else None


def numbers(texts: Iterable[bytes]) -> list[int]:
    """The versions among fields of a run's hash, oldest first."""
    return sorted(version for text in texts if (version := number(text)) is not None)


def head_of(run: str, text: bytes | None) -> int | None:
    """A run's head; None if there is none.

    Raises:
        CorruptError: it is not a version.
    """
    if not text:
        return None
    if (head := number(text)) is None:
        raise CorruptError(run, None, got=f"head {str(text)[:_SHOWN]}", expected="a version as its head")
    return head


def info_of(run: str, version: int, text: bytes) -> AdapterInfo:
    """A version's description.

    Raises:
        CorruptError: it cannot be read, or is another version's.
    """
    try:
        info = AdapterInfo.model_validate_json(text, extra="ignore")
    except ValidationError as error:
        raise CorruptError(run, version, got=str(error), expected="a version record") from error
    if (info.run, info.version) != (run, version):
        got = f"the record of version {info.version} of run {info.run!r}"
        raise CorruptError(run, version, got=got, expected="the version's own record")
    return info
