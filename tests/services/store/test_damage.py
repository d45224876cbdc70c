"""Garbage in Redis: it is named in the log, hides nothing else, and its run can be pushed again, or deleted."""

import json
import logging
from collections.abc import AsyncIterator, Callable

import pytest
import redis
from iteration_helpers import report, samples
from solrl_proto.problems import ProblemError
from solrl_proto.status import Activity, Work
from solrl_rollout.store import readable
from solrl_rollout.store.redis import RedisRunStore
from store_helpers import TENANT, adapter, fill, refusal

pytestmark = pytest.mark.anyio

TENANT_KEY = "solrl:{tenant-a}"
RUN = f"{TENANT_KEY}:run:run-a"
NONE = Work(done=0, total=1)
Damage = Callable[[redis.Redis], object]


@pytest.fixture
async def store(empty_redis_url: str) -> AsyncIterator[RedisRunStore]:
    """Two runs of one tenant, with three versions and three iterations each."""
    opened = RedisRunStore(empty_redis_url, retain=8)
    for run in ("run-a", "run-b"):
        await fill(opened, 3, run=run)
        for i in range(3):
            await opened.add_iteration(TENANT, run, report(i, samples=samples(i)))
    yield opened
    await opened.close()


@pytest.fixture
def client(empty_redis_url: str) -> redis.Redis:
    return redis.Redis.from_url(empty_redis_url)


OF_A_RUN: dict[str, Damage] = {
    "head": lambda redis: redis.hset(f"{RUN}:versions", "head", "newest"),
    "no head": lambda redis: redis.hdel(f"{RUN}:versions", "head"),
    "a record": lambda redis: redis.hset(f"{RUN}:versions", "1", "garbage"),
    "a version like 007": lambda redis: redis.hset(f"{RUN}:versions", "007", "garbage"),
    "versions of another type": lambda redis: redis.delete(f"{RUN}:versions") and redis.set(f"{RUN}:versions", "x"),
    "a pin": lambda redis: redis.sadd(f"{RUN}:pins", "all"),
    "pins of another type": lambda redis: redis.set(f"{RUN}:pins", "x"),
    "an iteration": lambda redis: redis.zadd(f"{RUN}:iterations", {"garbage": 1}),
    "an iteration of another shape": lambda redis: redis.zadd(f"{RUN}:iterations", {json.dumps({"x": 1}): 1}),
    "iterations of another type": lambda redis: redis.set(f"{RUN}:iterations", "x"),
    "the last": lambda redis: redis.hset(f"{RUN}:progress", "last", "garbage"),
    "no last": lambda redis: redis.hdel(f"{RUN}:progress", "last"),
    "the samples": lambda redis: redis.hset(f"{RUN}:progress", "samples", "garbage"),
    "the iteration of the samples": lambda redis: redis.hset(f"{RUN}:progress", "sampled", "garbage"),
    "the revision": lambda redis: redis.hset(f"{RUN}:progress", "revision", "inf"),
    "progress of another type": lambda redis: redis.delete(f"{RUN}:progress") and redis.set(f"{RUN}:progress", "x"),
    "a chunk of another type": lambda redis: [
        redis.delete(key) and redis.sadd(key, "x") for key in redis.keys(f"{RUN}:blob:*")
    ],
}
OF_A_TENANT: dict[str, Damage] = {
    "a run's name": lambda redis: redis.sadd(f"{TENANT_KEY}:runs", b"\xff../run-a"),
    "a run that is not there": lambda redis: redis.sadd(f"{TENANT_KEY}:runs", "run-c"),
    "bytes": lambda redis: redis.set(f"{TENANT_KEY}:bytes", "many"),
    "negative bytes": lambda redis: redis.set(f"{TENANT_KEY}:bytes", "-5"),
    "bytes of another type": lambda redis: (
        redis.delete(f"{TENANT_KEY}:bytes") and redis.sadd(f"{TENANT_KEY}:bytes", "x")
    ),
    "the revision": lambda redis: redis.set(f"{TENANT_KEY}:revision", "inf"),
}


async def refusals(store: RedisRunStore, run: str) -> set[str]:
    """Kinds of problems that reading all of a run ends in."""
    kinds = set()
    for reading in (
        store.head(TENANT, run),
        store.list(TENANT, run),
        store.info(TENANT, run, 2),
        store.get(TENANT, run, 2),
        store.iterations(TENANT, run),
        store.samples(TENANT, run),
        store.progress(TENANT, ["run-a", "run-b"]),
        store.runs(TENANT),
        store.quota_left(TENANT, run, 9),
    ):
        try:
            await reading
        except ProblemError as error:
            kinds.add(error.problem.kind)
    return kinds


@pytest.mark.parametrize("damage", [*OF_A_RUN.values(), *OF_A_TENANT.values()], ids=[*OF_A_RUN, *OF_A_TENANT])
async def test_it_hides_nothing_else_and_can_be_deleted(
    store: RedisRunStore, client: redis.Redis, damage: Damage
) -> None:
    damage(client)
    assert await refusals(store, "run-a") <= {"adapter-corrupt", "run-not-found"}
    assert await refusals(store, "run-b") == set()
    listed = await store.runs(TENANT)
    assert "run-b" in [one.run for one in listed.runs]
    assert listed.size > 0
    assert (await store.progress(TENANT, ["run-a", "run-b"]))["run-b"].last.iteration == 2

    await store.put(TENANT, *adapter(3, 2, run="run-b"))
    told = await store.add_iteration(TENANT, "run-b", report(3))
    assert (await store.progress(TENANT, ["run-b"]))["run-b"].revision == told

    await store.delete(TENANT, "run-a")
    assert [one.run for one in (await store.runs(TENANT)).runs] == ["run-b"]
    await fill(store, 2)
    await store.add_iteration(TENANT, "run-a", report(0))
    assert [point.iteration for point in await store.iterations(TENANT, "run-a")] == [0]
    assert (await store.list(TENANT, "run-a")).head == 1


async def test_a_damaged_list_of_runs_begins_anew(store: RedisRunStore, client: redis.Redis) -> None:
    client.delete(f"{TENANT_KEY}:runs")
    client.set(f"{TENANT_KEY}:runs", "garbage")
    assert (await store.runs(TENANT)).runs == ()
    await store.put(TENANT, *adapter(3, 2, run="run-b"))
    assert [one.run for one in (await store.runs(TENANT)).runs] == ["run-b"]


def put_garbage(client: redis.Redis, key: str) -> None:
    client.delete(key)
    client.lpush(key, "garbage") if key.endswith("activity") else client.set(key, "garbage")


@pytest.mark.parametrize("key", ["pins", "iterations", "progress", "activity"])
async def test_a_key_of_another_type_is_named_and_the_next_write_begins_it_anew(
    store: RedisRunStore, client: redis.Redis, caplog: pytest.LogCaptureFixture, key: str
) -> None:
    put_garbage(client, f"{RUN}:{key}")
    with caplog.at_level(logging.WARNING):
        assert await refusals(store, "run-a") == set()
        assert await store.activities(TENANT, ["run-a"]) == {}
    assert {line for line in caplog.messages if "WRONGTYPE" in line and f"{RUN}:{key}" in line}
    await store.pin(TENANT, "run-a", 1, True)
    await store.put(TENANT, *adapter(3, 2))
    await store.add_iteration(TENANT, "run-a", report(3, samples=samples(3)))
    await store.set_activity(TENANT, "run-a", Activity(iteration=4, explored=NONE, trained=NONE))
    assert (await store.list(TENANT, "run-a")).pinned == (1,)
    assert (await store.iterations(TENANT, "run-a"))[-1].iteration == 3
    assert (await store.progress(TENANT, ["run-a"]))["run-a"].last.iteration == 3
    assert "run-a" in await store.activities(TENANT, ["run-a"])


@pytest.mark.parametrize("delete", [False, True])
async def test_a_run_whose_versions_are_garbage_is_pushed_again_and_keeps_its_curves(
    store: RedisRunStore, client: redis.Redis, delete: bool
) -> None:
    held = (await store.runs(TENANT)).size
    client.set(f"{RUN}:blob:9:upload:0", "x", ex=600)
    put_garbage(client, f"{RUN}:versions")
    for reading in (store.info(TENANT, "run-a", 2), store.list(TENANT, "run-a"), store.pin(TENANT, "run-a", 2, True)):
        assert (await refusal(reading)).kind == "run-not-found"
    put_garbage(client, f"{RUN}:versions")
    assert await store.head(TENANT, "run-a") is None
    if delete:
        await store.delete(TENANT, "run-a")
    else:
        assert (await refusal(store.put(TENANT, *adapter(3, 2)))).kind == "parent-conflict"
    assert client.keys(f"{RUN}:blob:*") == [f"{RUN}:blob:9:upload:0".encode()]
    assert (await store.runs(TENANT)).size == held / 2
    await fill(store, 3)
    assert (await store.list(TENANT, "run-a")).head == 2
    assert (await store.runs(TENANT)).size == held
    points = await store.iterations(TENANT, "run-a")
    assert [point.iteration for point in points] == ([] if delete else [0, 1, 2])


async def test_a_chunk_of_another_type_is_a_damaged_version(store: RedisRunStore, client: redis.Redis) -> None:
    (chunk,) = client.keys(f"{RUN}:blob:2:*")
    client.delete(chunk)
    client.sadd(chunk, "garbage")
    problem = await refusal(store.get(TENANT, "run-a", 2))
    assert (problem.kind, problem.status) == ("adapter-corrupt", 500)
    assert (await store.get(TENANT, "run-a", 1))[0].version == 1


@pytest.mark.parametrize("garbage", ["garbage", json.dumps({"iteration": 1})])
async def test_other_iterations_are_read(
    store: RedisRunStore, client: redis.Redis, caplog: pytest.LogCaptureFixture, garbage: str
) -> None:
    client.zadd(f"{RUN}:iterations", {garbage: 1})
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert [point.iteration for point in await store.iterations(TENANT, "run-a")] == [0, 1, 2]
    (line,) = [record.message for record in caplog.records]
    assert "'run-a'" in line


async def test_a_head_that_is_no_number_is_named(store: RedisRunStore, client: redis.Redis) -> None:
    client.hset(f"{RUN}:versions", "head", "newest")
    for doing in (
        store.head(TENANT, "run-a"),
        store.put(TENANT, *adapter(3, 2)),
        store.rewind(TENANT, "run-a", 1, 2),
        store.info(TENANT, "run-a", 9),
    ):
        problem = await refusal(doing)
        assert (problem.status, problem.kind) == (500, "adapter-corrupt")
        assert "'run-a'" in problem.detail
        assert "newest" in str(problem.got)


def test_fields_of_a_newer_replica_are_ignored(caplog: pytest.LogCaptureFixture) -> None:
    told = report(0).model_dump(exclude={"samples"})
    newer = json.dumps(told | {"score": told["score"] | {"median": 0.5}, "new": 1}).encode()
    (point,) = readable.Damage().points("run-a", [newer])
    assert point.score == report(0).score
    assert not caplog.records
