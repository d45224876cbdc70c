"""Properties of the Redis store: remaining keys, refused uploads, damage and outages."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis
from redis.asyncio.client import Pipeline
from solrl_proto.adapters import AdapterInfo
from solrl_rollout.store.redis import CHUNK_BYTES, Keys, Record, RedisRunStore, weaknesses
from store_helpers import TENANT, adapter, fill, kept, refusal

pytestmark = pytest.mark.anyio

ALWAYS = {"solrl:{tenant-a}:runs", "solrl:{tenant-a}:bytes", "solrl:{tenant-a}:run:run-a:versions"}
"""Keys of a run, except its chunks."""


@pytest.fixture
async def redis_store(empty_redis_url: str) -> AsyncIterator[RedisRunStore]:
    opened = RedisRunStore(empty_redis_url, retain=3)
    yield opened
    await opened.close()


@pytest.fixture
def client(empty_redis_url: str) -> redis.Redis:
    return redis.Redis.from_url(empty_redis_url)


def keys_of(client: redis.Redis, *, expiring: bool) -> set[str]:
    return {bytes(key).decode() for key in client.scan_iter() if (client.ttl(key) >= 0) == expiring}


async def test_two_clients_share_one_redis(redis_store: RedisRunStore, empty_redis_url: str) -> None:
    body = bytes(range(256)) * (CHUNK_BYTES // 128) + b"the third chunk"
    info, _ = adapter(0, None, body=body)
    await redis_store.put(TENANT, info, body)
    other = RedisRunStore(empty_redis_url)
    assert await other.get(TENANT, "run-a", 0) == (info, body)
    await other.close()


async def test_exactly_these_keys_remain(redis_store: RedisRunStore, client: redis.Redis) -> None:
    body = bytes(2 * CHUNK_BYTES + 1)
    for version in range(5):
        await redis_store.put(TENANT, *adapter(version, version - 1 if version else None, body=body))
    records = client.hgetall("solrl:{tenant-a}:run:run-a:versions")
    assert records.pop(b"head") == b"4"
    assert set(records) == {b"2", b"3", b"4"}
    held = [json.loads(record) for record in records.values()]
    places = [(record["info"]["version"], record["token"]) for record in held]
    chunks = {f"solrl:{{tenant-a}}:run:run-a:blob:{version}:{token}:{i}" for version, token in places for i in range(3)}
    assert keys_of(client, expiring=False) == ALWAYS | chunks
    assert keys_of(client, expiring=True) == set()


class Overtaken(RedisRunStore):
    """A client that `rival` overtakes between its upload and its commit."""

    rival: tuple[RedisRunStore, AdapterInfo, bytes]

    async def _upload(self, keys: Keys, record: Record, body: bytes) -> tuple[str, ...]:
        chunks = await super()._upload(keys, record, body)
        store, info, winner = self.rival
        await store.put(TENANT, info, winner)
        return chunks


@pytest.fixture
async def overtaken(empty_redis_url: str) -> AsyncIterator[Overtaken]:
    opened = Overtaken(empty_redis_url, retain=3)
    yield opened
    await opened.close()


@pytest.mark.parametrize(("version", "kind"), [(0, "version-conflict"), (1, "parent-conflict")])
async def test_an_upload_that_loses_a_race_leaves_no_keys(
    overtaken: Overtaken, redis_store: RedisRunStore, client: redis.Redis, version: int, kind: str
) -> None:
    winner = adapter(0, None, "winner")
    overtaken.rival = (redis_store, *winner)
    problem = await refusal(overtaken.put(TENANT, *adapter(version, None, "loser")))
    assert (problem.status, problem.kind) == (409, kind)
    assert await kept(redis_store) == [0]
    assert await redis_store.get(TENANT, "run-a", 0) == winner
    record = client.hget("solrl:{tenant-a}:run:run-a:versions", "0")
    assert record is not None
    token = json.loads(record)["token"]
    assert keys_of(client, expiring=False) == ALWAYS | {f"solrl:{{tenant-a}}:run:run-a:blob:0:{token}:0"}
    assert keys_of(client, expiring=True) == set()


async def test_an_upload_overtaken_by_its_own_retry_succeeds(overtaken: Overtaken, redis_store: RedisRunStore) -> None:
    info, body = adapter(0, None)
    overtaken.rival = (redis_store, info, body)
    assert await overtaken.put(TENANT, info, body) == (info, False)
    assert await redis_store.get(TENANT, "run-a", 0) == (info, body)


async def test_a_commit_repeated_after_a_lost_answer_keeps_the_version(
    redis_store: RedisRunStore, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate = Pipeline.eval

    def again(pipe: Pipeline, *arguments: Any) -> Any:
        client.eval(*arguments)
        return evaluate(pipe, *arguments)

    monkeypatch.setattr(Pipeline, "eval", again)
    info, body = adapter(0, None)
    assert await redis_store.put(TENANT, info, body) == (info, True)
    assert await redis_store.get(TENANT, "run-a", 0) == (info, body)
    assert client.get("solrl:{tenant-a}:bytes") == str(info.size).encode()


@pytest.fixture
def slow_disk(client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> redis.Redis:
    """The disk writes nothing until `synced` is set. It replaces WAITAOF, which Redis before 7.2 does not have."""

    def waitaof(pipe: Pipeline, *_: int) -> Pipeline:
        return pipe.eval("return {redis.call('EXISTS', 'synced'), 0}", 0)

    monkeypatch.setattr(Pipeline, "waitaof", waitaof)
    return client


def changes(client: redis.Redis) -> int:
    count: int = client.info("persistence")["rdb_changes_since_last_save"]
    return count


async def test_no_retry_is_acknowledged_before_the_version_is_on_disk(
    redis_store: RedisRunStore, slow_disk: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "_durable", True)
    info, body = adapter(0, None)
    for _ in range(2):
        before = changes(slow_disk)
        problem = await refusal(redis_store.put(TENANT, info, body))
        assert (problem.status, problem.kind) == (503, "store-unavailable")
        assert "to disk" in problem.detail
        assert changes(slow_disk) > before, "WAITAOF waits for what its own connection wrote"
    slow_disk.set("synced", 1)
    assert await redis_store.put(TENANT, info, body) == (info, False)
    assert await redis_store.get(TENANT, "run-a", 0) == (info, body)


async def test_no_rewind_is_acknowledged_before_it_is_on_disk(
    redis_store: RedisRunStore, slow_disk: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(redis_store, 2)
    monkeypatch.setattr(redis_store, "_durable", True)
    for _ in range(2):
        before = changes(slow_disk)
        problem = await refusal(redis_store.rewind(TENANT, "run-a", 0, 1))
        assert (problem.status, problem.kind) == (503, "store-unavailable")
        assert changes(slow_disk) > before, "WAITAOF waits for what its own connection wrote"
    slow_disk.set("synced", 1)
    await redis_store.rewind(TENANT, "run-a", 0, 1)
    assert await kept(redis_store) == [0]


async def test_no_push_overtaken_by_its_retry_is_acknowledged_before_it_is_on_disk(
    overtaken: Overtaken, redis_store: RedisRunStore, slow_disk: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overtaken, "_durable", True)
    info, body = adapter(0, None)
    overtaken.rival = (redis_store, info, body)
    problem = await refusal(overtaken.put(TENANT, info, body))
    assert (problem.status, problem.kind) == (503, "store-unavailable")


class Dying(RedisRunStore):
    """A client that dies between upload and commit."""

    async def _upload(self, keys: Keys, record: Record, body: bytes) -> tuple[str, ...]:
        await super()._upload(keys, record, body)
        raise asyncio.CancelledError


async def test_an_interrupted_upload_leaves_only_expiring_keys(
    empty_redis_url: str, redis_store: RedisRunStore, client: redis.Redis
) -> None:
    dying = Dying(empty_redis_url)
    with pytest.raises(asyncio.CancelledError):
        await dying.put(TENANT, *adapter(0, None))
    await dying.close()
    assert keys_of(client, expiring=False) == set()
    assert len(keys_of(client, expiring=True)) == 1
    await fill(redis_store, 1)
    assert await kept(redis_store) == [0]


class Slow(RedisRunStore):
    """A client whose first chunk expires before its commit."""

    async def _upload(self, keys: Keys, record: Record, body: bytes) -> tuple[str, ...]:
        chunks = await super()._upload(keys, record, body)
        await self._redis.delete(chunks[0])
        return chunks


async def test_an_upload_that_expired_is_not_acknowledged(empty_redis_url: str, client: redis.Redis) -> None:
    slow = Slow(empty_redis_url)
    problem = await refusal(slow.put(TENANT, *adapter(0, None, body=bytes(CHUNK_BYTES + 1))))
    await slow.close()
    assert (problem.status, problem.kind) == (503, "store-unavailable")
    assert keys_of(client, expiring=False) == set()


async def test_a_deleted_run_leaves_only_the_count(redis_store: RedisRunStore, client: redis.Redis) -> None:
    await fill(redis_store, 3)
    await redis_store.pin(TENANT, "run-a", 1, True)
    await redis_store.delete(TENANT, "run-a")
    assert keys_of(client, expiring=False) == {"solrl:{tenant-a}:bytes"}
    assert client.get("solrl:{tenant-a}:bytes") == b"0"


async def test_a_rewind_leaves_no_keys_of_deleted_versions(redis_store: RedisRunStore, client: redis.Redis) -> None:
    await fill(redis_store, 1)
    before = keys_of(client, expiring=False)
    for version in (1, 2):
        await redis_store.put(TENANT, *adapter(version, version - 1))
    await redis_store.rewind(TENANT, "run-a", 0, 2)
    assert keys_of(client, expiring=False) == before
    assert set(client.hkeys("solrl:{tenant-a}:run:run-a:versions")) == {b"0", b"head"}


async def test_a_damaged_record_does_not_block_newer_versions(redis_store: RedisRunStore, client: redis.Redis) -> None:
    await fill(redis_store, 3)
    client.hset("solrl:{tenant-a}:run:run-a:versions", "0", "not JSON")
    await redis_store.put(TENANT, *adapter(3, 2))
    assert await kept(redis_store) == [1, 2, 3]


async def test_redis_settings_that_risk_losing_adapters_are_reported(own_redis) -> None:  # type: ignore[no-untyped-def]
    store = RedisRunStore(own_redis.url)
    (told,) = await store.warnings()
    assert "append-only" in told
    with redis.Redis.from_url(own_redis.url) as client:
        client.config_set("appendonly", "yes")
        assert await store.warnings() == ()
        client.config_set("maxmemory", "100mb")
        client.config_set("maxmemory-policy", "allkeys-lru")
    (told,) = await store.warnings()
    assert "noeviction" in told
    await store.close()
    unsynced = {"maxmemory": "0", "maxmemory-policy": "allkeys-lru", "appendonly": "yes", "appendfsync": "no"}
    assert ["appendfsync" in told for told in weaknesses(unsynced)] == [True]


class Overtaking(RedisRunStore):
    """Between finding a version and reading it, the run is rewound and the version pushed again."""

    async def _download(self, keys: Keys, record: Record) -> bytes | None:
        if record.info.digest == adapter(1, 0)[0].digest:
            await self.rewind(TENANT, "run-a", 0, 1)
            await self.put(TENANT, *adapter(1, 0, body=b"another"))
        return await super()._download(keys, record)


async def test_a_version_pushed_again_during_a_read_is_not_reported_as_damaged(empty_redis_url: str) -> None:
    store = Overtaking(empty_redis_url)
    await fill(store, 2)
    assert await store.get(TENANT, "run-a", 1) == adapter(1, 0, body=b"another")
    await store.close()


@pytest.mark.parametrize("damage", ["flipped", "lost", "record"])
async def test_damage_in_redis_is_found_at_get(redis_store: RedisRunStore, client: redis.Redis, damage: str) -> None:
    await fill(redis_store, 1)
    (chunk,) = client.keys("solrl:{tenant-a}:run:run-a:blob:*")
    if damage == "flipped":
        client.setrange(chunk, 0, b"\xff")
    elif damage == "lost":
        client.delete(chunk)
    else:
        client.hset("solrl:{tenant-a}:run:run-a:versions", "0", "{}")
    problem = await refusal(redis_store.get(TENANT, "run-a", 0))
    assert (problem.status, problem.kind) == (500, "adapter-corrupt")


async def test_a_killed_redis_is_503_and_the_password_stays_secret(own_redis) -> None:  # type: ignore[no-untyped-def]
    address = own_redis.url.removeprefix("redis://").removesuffix("/0")
    own_redis.kill()
    store = RedisRunStore(f"redis://user:hunter2@{address}/0")
    doings = [
        store.ping(),
        store.put(TENANT, *adapter(0, None)),
        store.get(TENANT, "r", 0),
        store.info(TENANT, "r", 0),
        store.list(TENANT, "r"),
    ]
    for problem in await asyncio.gather(*(refusal(doing) for doing in doings)):
        assert (problem.status, problem.kind, problem.got) == (503, "store-unavailable", address)
        assert "hunter2" not in str(problem)
        assert problem.action
    await store.close()


async def test_a_redis_out_of_memory_is_503_and_stores_nothing(own_redis) -> None:  # type: ignore[no-untyped-def]
    with redis.Redis.from_url(own_redis.url) as client:
        client.config_set("maxmemory", "1mb")
    store = RedisRunStore(own_redis.url)
    problem = await refusal(store.put(TENANT, *adapter(0, None, body=bytes(CHUNK_BYTES))))
    assert (problem.status, problem.kind) == (503, "store-unavailable")
    assert (await refusal(store.list(TENANT, "run-a"))).kind == "run-not-found"
    await store.close()


async def test_an_upload_that_reaches_the_memory_limit_leaves_nothing(own_redis) -> None:  # type: ignore[no-untyped-def]
    body = bytes(8 * CHUNK_BYTES)
    with redis.Redis.from_url(own_redis.url) as client:
        client.config_set("maxmemory", client.info("memory")["used_memory"] + 3 * CHUNK_BYTES)
        store = RedisRunStore(own_redis.url)
        problem = await refusal(store.put(TENANT, *adapter(0, None, body=body)))
        assert (problem.status, problem.kind) == (503, "store-unavailable")
        assert "memory" in problem.detail
        assert client.keys() == []
    await store.close()


async def test_more_commands_than_connections_wait_for_their_turn(redis_store: RedisRunStore) -> None:
    await fill(redis_store, 2)
    lists = await asyncio.gather(*(redis_store.runs(TENANT) for _ in range(300)), redis_store.ping())
    assert all(len(one.runs) == 1 for one in lists[:-1])


RECORDS = "solrl:{tenant-a}:run:run-a:versions"


async def test_a_record_copied_to_another_version_is_not_served(
    redis_store: RedisRunStore, client: redis.Redis
) -> None:
    await fill(redis_store, 2)
    await fill(redis_store, 2, run="run-b")
    for key, field in ((RECORDS, "0"), (RECORDS.replace("run-a", "run-b"), "1")):
        record = client.hget(key, field)
        assert record is not None
        client.hset(RECORDS, "1", record)
        for doing in (redis_store.info(TENANT, "run-a", 1), redis_store.get(TENANT, "run-a", 1)):
            assert (await refusal(doing)).kind == "adapter-corrupt"


async def test_a_damaged_record_does_not_break_tenants_lists(redis_store: RedisRunStore, client: redis.Redis) -> None:
    await fill(redis_store, 2)
    await fill(redis_store, 1, run="run-b")
    client.hset(RECORDS, mapping={"0": "not JSON", "what": "is this"})
    assert await kept(redis_store) == [1]
    client.hset(RECORDS, "1", "not JSON")
    assert [one.run for one in (await redis_store.runs(TENANT)).runs] == ["run-b"]
    assert (await refusal(redis_store.list(TENANT, "run-a"))).kind == "adapter-corrupt"


@pytest.mark.parametrize("field", ["chunks", "size"])
async def test_a_record_of_a_million_chunks_is_rejected(
    redis_store: RedisRunStore, client: redis.Redis, field: str
) -> None:
    await fill(redis_store, 1)
    text = client.hget(RECORDS, "0")
    assert text is not None
    record = json.loads(text)
    (record if field == "chunks" else record["info"])[field] = 10**6 if field == "chunks" else "large"
    client.hset(RECORDS, "0", json.dumps(record))
    client.config_resetstat()
    await redis_store.delete(TENANT, "run-a")
    assert client.info("commandstats")["cmdstat_unlink"]["calls"] == 1  # for the run's keys
    assert await redis_store.head(TENANT, "run-a") is None
