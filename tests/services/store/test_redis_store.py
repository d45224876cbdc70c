"""Properties of the Redis store: remaining keys, refused uploads, damage and outages."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis
from redis.asyncio import Redis
from solrl_proto.adapters import AdapterInfo
from solrl_rollout.store.redis_store import RedisRunStore, log_damage
from tests.services.iteration_helpers import report
from tests.services.store_helpers import TENANT, adapter, fill, kept, refusal

pytestmark = pytest.mark.anyio

RECORDS = "solrl:{tenant-a}:run:run-a:versions"


@pytest.fixture(params=["protocol=2", "protocol=3"])
async def redis_store(request: pytest.FixtureRequest, empty_redis_url: str) -> AsyncIterator[RedisRunStore]:
    """An empty store by either protocol of Redis: redis-py speaks 2 by default before its version 8, then 3."""
    log_damage.cache_clear()
    opened = RedisRunStore(f"{empty_redis_url}?{request.param}", retain=3)
    yield opened
    await opened.close()


@pytest.fixture
def client(empty_redis_url: str) -> redis.Redis:
    return redis.Redis.from_url(empty_redis_url)


def keys_of(client: redis.Redis) -> set[str]:
    return {bytes(key).decode() for key in client.scan_iter()}


async def test_a_push_repeated_after_a_lost_answer_keeps_the_version(
    redis_store: RedisRunStore, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate = Redis.evalsha

    async def twice(asked: Redis, *arguments: Any) -> Any:
        await evaluate(asked, *arguments)
        return await evaluate(asked, *arguments)

    monkeypatch.setattr(Redis, "evalsha", twice)
    info, body = adapter(0, None)
    assert (await redis_store.put(TENANT, info, body))[0] == info
    assert await redis_store.get(TENANT, "run-a", 0) == (info, body)


async def test_a_rewind_leaves_no_keys_of_deleted_versions(redis_store: RedisRunStore, client: redis.Redis) -> None:
    await fill(redis_store, 1)
    before = keys_of(client)
    for version in (1, 2):
        await redis_store.put(TENANT, *adapter(version, version - 1))
    await redis_store.rewind(TENANT, "run-a", 0, 2)
    assert keys_of(client) == before
    assert set(client.hkeys(RECORDS)) == {b"0", b"head"}


async def test_a_damaged_record_blocks_no_newer_ones_or_lists(redis_store: RedisRunStore, client: redis.Redis) -> None:
    await fill(redis_store, 3)
    await fill(redis_store, 1, run="run-b")
    client.hset(RECORDS, mapping={"0": "not JSON", "what": "is this"})
    assert await kept(redis_store) == [1, 2]
    await redis_store.put(TENANT, *adapter(3, 2))
    assert await kept(redis_store) == [1, 2, 3]
    client.hset(RECORDS, mapping=dict.fromkeys("123", "not JSON"))
    assert [one.run for one in (await redis_store.runs(TENANT)).runs] == ["run-b"]
    assert (await refusal(redis_store.list(TENANT, "run-a"))).kind == "adapter-corrupt"


async def test_a_damaged_report_hides_no_other(redis_store: RedisRunStore, client: redis.Redis) -> None:
    await fill(redis_store, 1)
    await redis_store.add_iteration(TENANT, "run-a", report(0))
    client.zadd(RECORDS.replace("versions", "iterations"), {"garbage": 1})
    client.hset(RECORDS.replace("versions", "progress"), mapping={"last": "garbage", "samples": "garbage"})
    assert [point.iteration for point in await redis_store.iterations(TENANT, "run-a")] == [0]
    assert await redis_store.progress(TENANT, ["run-a"]) == {}
    assert await redis_store.samples(TENANT, "run-a") is None


class Overtaking(RedisRunStore):
    """Between finding a version and reading it, the run is rewound and the version pushed again."""

    async def info(self, tenant: str, run: str, version: int) -> AdapterInfo:
        found = await super().info(tenant, run, version)
        if found == adapter(1, 0)[0]:
            await self.rewind(TENANT, "run-a", 0, 1)
            await self.put(TENANT, *adapter(1, 0, body=b"another"))
        return found


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
        client.hset(RECORDS, "0", "{}")
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
    problem = await refusal(store.put(TENANT, *adapter(0, None, body=bytes(2**22))))
    assert (problem.status, problem.kind) == (503, "store-unavailable")
    assert "raise Redis' maxmemory" in str(problem.action)
    assert "script" not in str(problem)
    assert (await refusal(store.list(TENANT, "run-a"))).kind == "run-not-found"
    await store.close()


async def test_more_commands_than_connections_wait_their_turn(redis_store: RedisRunStore, empty_redis_url: str) -> None:
    info, body = adapter(0, None, body=bytes(range(256)) * 2**16)
    await redis_store.put(TENANT, info, body)
    other = RedisRunStore(empty_redis_url)
    lists = await asyncio.gather(*(other.runs(TENANT) for _ in range(300)), other.ping())
    assert all(len(one.runs) == 1 for one in lists[:-1])
    assert await other.get(TENANT, "run-a", 0) == (info, body)
    await other.close()


async def test_a_record_copied_to_other_versions_is_not_served(redis_store: RedisRunStore, client: redis.Redis) -> None:
    await fill(redis_store, 2)
    await fill(redis_store, 2, run="run-b")
    for key, field in ((RECORDS, "0"), (RECORDS.replace("run-a", "run-b"), "1")):
        record = client.hget(key, field)
        assert record is not None
        client.hset(RECORDS, "1", record)
        for doing in (redis_store.info(TENANT, "run-a", 1), redis_store.get(TENANT, "run-a", 1)):
            assert (await refusal(doing)).kind == "adapter-corrupt"


async def test_fields_of_a_newer_replica_are_ignored(redis_store: RedisRunStore, client: redis.Redis) -> None:
    await fill(redis_store, 1)
    record = json.loads(client.hget(RECORDS, "0") or b"")
    client.hset(RECORDS, "0", json.dumps(record | {"new": 1}))
    assert await redis_store.info(TENANT, "run-a", 0) == adapter(0, None)[0]
    told = report(0).model_dump(exclude={"samples"})
    newer = json.dumps(told | {"score": told["score"] | {"median": 0.5}, "new": 1})
    client.zadd(RECORDS.replace("versions", "iterations"), {newer: 0})
    assert [point.score for point in await redis_store.iterations(TENANT, "run-a")] == [report(0).score]


async def test_a_head_that_is_no_number_is_damage_of_the_run(redis_store: RedisRunStore, client: redis.Redis) -> None:
    await fill(redis_store, 3)
    client.hset(RECORDS, "head", "newest")
    for doing in (
        redis_store.head(TENANT, "run-a"),
        redis_store.put(TENANT, *adapter(3, 2)),
        redis_store.rewind(TENANT, "run-a", 1, 2),
        redis_store.info(TENANT, "run-a", 9),
    ):
        problem = await refusal(doing)
        assert (problem.status, problem.kind) == (500, "adapter-corrupt")
        assert "newest" in str(problem.got)
    await redis_store.delete(TENANT, "run-a")
    await fill(redis_store, 1)
    assert await kept(redis_store) == [0]


@pytest.mark.parametrize("text", ["abc", "-1", "007", "0x1", "nan", "9" * 16, "9" * 5000])
async def test_a_number_of_another_form_is_omitted_and_breaks_no_list(
    redis_store: RedisRunStore, client: redis.Redis, text: str
) -> None:
    await fill(redis_store, 2)
    await redis_store.add_iteration(TENANT, "run-a", report(0))
    client.hset(RECORDS, text, "a version")
    client.hset(RECORDS.replace("versions", "progress"), "revision", text)
    client.set("solrl:{tenant-a}:revision", text)
    client.hset("solrl:{tenant-a}:bytes", "run-b", text)
    (run,) = (await redis_store.runs(TENANT)).runs
    assert [info.version for info in run.versions] == [0, 1]
    assert run == await redis_store.list(TENANT, "run-a")
    assert await redis_store.progress(TENANT, ["run-a"]) == {}
    await redis_store.put(TENANT, *adapter(2, 1))
    await redis_store.rewind(TENANT, "run-a", 1, 2)
    revision = await redis_store.add_iteration(TENANT, "run-a", report(1))
    assert (await redis_store.progress(TENANT, ["run-a"]))["run-a"].revision == revision


@pytest.mark.parametrize("state", ["replica", "no scripts", "full"])
async def test_a_redis_that_takes_no_writes_does_not_pass_for_ready(own_redis, state: str) -> None:  # type: ignore[no-untyped-def]
    store = RedisRunStore(own_redis.url)
    await store.ping()
    with redis.Redis.from_url(own_redis.url) as client:
        if state == "replica":
            client.replicaof("127.0.0.1", "1")
        elif state == "no scripts":
            client.execute_command("ACL", "SETUSER", "default", "-eval", "-evalsha")
        else:
            client.config_set("maxmemory", "1mb")
    if state == "full":  # only uploads are refused
        await store.ping()
    else:
        problem = await refusal(store.ping())
        assert (problem.status, problem.kind) == (503, "store-unavailable")
        assert "accepts writes" in str(problem.action)
    await store.close()


async def test_a_push_gives_no_script_its_bytes_and_reads_no_other_runs_versions(own_redis) -> None:  # type: ignore[no-untyped-def]
    """Redis serves nobody else while it copies a script's arguments, and while the script runs."""
    store = RedisRunStore(own_redis.url, retain=50, quota=2**20)
    with redis.Redis.from_url(own_redis.url) as client:

        async def sizes_read(version: int) -> int:
            before = client.info("commandstats").get("cmdstat_strlen", {"calls": 0})["calls"]
            await store.put(TENANT, *adapter(version, version - 1 if version else None, run="run-b"))
            calls: int = client.info("commandstats")["cmdstat_strlen"]["calls"] - before
            return calls

        first = await sizes_read(0)
        await fill(store, 20)
        assert await sizes_read(1) == first + 1
        client.config_set("slowlog-log-slower-than", 0)
        await store.put(TENANT, *adapter(20, 19, body=b"these bytes" * 1000))
        before = keys_of(client)
        assert (await refusal(store.put(TENANT, *adapter(21, 20, body=bytes(2**20))))).kind == "adapter-quota"
        assert (await refusal(store.put(TENANT, *adapter(21, 3, body=b"other")))).kind == "parent-conflict"
        assert keys_of(client) == before, "no upload is left"
        assert client.ttl("solrl:{tenant-a}:run:run-a:blob:20") == -1
        commands = [one["command"] for one in client.slowlog_get(1000)]
    told = {one.split()[0] for one in commands if b"these bytes" in one}
    assert told == {b"SET"}
    await store.close()
