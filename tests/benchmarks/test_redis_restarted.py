"""The row redis-restarted accepts the keys of an earlier push, and no mixture of two."""

from collections.abc import Iterator

import pytest
import redis
from fault_trials.findings import Findings
from fault_trials.redis_killed import RUN, TENANT, version
from fault_trials.redis_restarted import judge_older
from solrl_rollout.store.redis_store import RedisRunStore
from support.redis_server import Keys, RedisServer, dump, running_redis

pytestmark = pytest.mark.anyio


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with running_redis("everysec") as running:
        yield running


async def pushed(server: RedisServer, count: int) -> tuple[RedisRunStore, list[Keys]]:
    """A store with `count` versions, and the server's keys before them and after each."""
    store, snapshots = RedisRunStore(server.url), [dump(server.url)]
    for number in range(count):
        await store.put(TENANT, *version(number, b"weights %d" % number))
        snapshots.append(dump(server.url))
    return store, snapshots


async def judged(store: RedisRunStore, server: RedisServer, snapshots: list[Keys]) -> tuple[int | None, list[str]]:
    findings = Findings()
    head = await judge_older(store, dump(server.url), snapshots, "trial", findings)
    await store.close()
    return head, findings.broken


@pytest.mark.parametrize("held", [0, 1, 2])
async def test_the_keys_of_an_earlier_push_are_whole(server: RedisServer, held: int) -> None:
    store, snapshots = await pushed(server, held)
    later: list[Keys] = [{b"later": (False, b"")}]
    assert await judged(store, server, snapshots + later) == (held - 1 if held else None, [])


async def test_a_key_that_another_push_wrote_is_noticed(server: RedisServer) -> None:
    store, snapshots = await pushed(server, 2)
    with redis.Redis.from_url(server.url) as client:
        client.set(f"solrl:{{{TENANT}}}:revision", 1)
    _, broken = await judged(store, server, snapshots)
    assert broken == ["trial: the keys are not those of version 1"]


async def test_a_version_without_its_weights_is_noticed(server: RedisServer) -> None:
    store, snapshots = await pushed(server, 2)
    with redis.Redis.from_url(server.url) as client:
        client.delete(f"solrl:{{{TENANT}}}:run:{RUN}:blob:0")
    _, broken = await judged(store, server, snapshots)
    assert any("CorruptError" in one for one in broken)


def test_all_writes_so_far_are_in_the_file(server: RedisServer) -> None:
    with redis.Redis.from_url(server.url) as client:
        for number in range(100):
            client.set(f"key {number}", bytes(2**16))
    server.wait_until_written()
    server.restart()
    assert len(dump(server.url)) == 100
