"""Reports of iterations: one contract for every store."""

import pytest
import redis
from solrl_proto.status import Point
from solrl_rollout.store import RunStore, open_store
from solrl_rollout.store.run_store import encode_point
from tests.services.iteration_helpers import report, samples
from tests.services.store_helpers import TENANT, fill, refusal

pytestmark = pytest.mark.anyio


@pytest.fixture
async def store(store: RunStore) -> RunStore:
    """A store with a run."""
    await fill(store, 1)
    return store


async def told(store: RunStore, run: str = "run-a") -> list[int]:
    return [point.iteration for point in await store.iterations(TENANT, run)]


async def test_reports_are_stored_in_order(store: RunStore) -> None:
    assert await told(store) == []
    reports = [report(i, 1 / (1 + i)) for i in (0, 1, 9, 10, 2**53 - 2)]
    for one in reports:
        await store.add_iteration(TENANT, "run-a", one)
    points = await store.iterations(TENANT, "run-a")
    assert [point.model_dump() for point in points] == [one.model_dump(exclude={"samples"}) for one in reports]
    assert all(type(point) is Point for point in points)


async def test_a_repeated_report_replaces_this_and_all_later_iterations(store: RunStore) -> None:
    for i in range(5):
        await store.add_iteration(TENANT, "run-a", report(i))
    await store.add_iteration(TENANT, "run-a", report(4, 0.9))
    await store.add_iteration(TENANT, "run-a", report(4, 0.9))
    assert [p.score.mean for p in await store.iterations(TENANT, "run-a")] == [0.5] * 4 + [0.9]
    await store.add_iteration(TENANT, "run-a", report(2, 0.7))
    assert await told(store) == [0, 1, 2]
    assert (await store.progress(TENANT, ["run-a"]))["run-a"].last == (await store.iterations(TENANT, "run-a"))[-1]


async def test_the_newest_samples_are_kept_unless_the_run_was_rewound(store: RunStore) -> None:
    assert await store.samples(TENANT, "run-a") is None
    await store.add_iteration(TENANT, "run-a", report(0, samples=samples(0)))
    await store.add_iteration(TENANT, "run-a", report(1, samples=samples(1)))
    await store.add_iteration(TENANT, "run-a", report(2))
    assert await store.samples(TENANT, "run-a") == samples(1)
    await store.add_iteration(TENANT, "run-a", report(1))
    assert await store.samples(TENANT, "run-a") == samples(1)
    await store.add_iteration(TENANT, "run-a", report(0))
    assert await store.samples(TENANT, "run-a") is None


async def test_revisions_grow_over_all_runs(store: RunStore) -> None:
    await fill(store, 1, run="run-b")
    assert await store.progress(TENANT, ["run-a", "run-b", "nobody"]) == {}
    told = [await store.add_iteration(TENANT, run, report(0)) for run in ("run-a", "run-b", "run-a")]
    assert told == sorted(set(told))
    progress = await store.progress(TENANT, ["run-b", "nobody", "run-a"])
    assert {run: one.revision for run, one in progress.items()} == {"run-a": told[2], "run-b": told[1]}


@pytest.mark.parametrize(
    ("limit", "most"), [("KEPT_POINTS", 4), ("KEPT_POINT_BYTES", 4 * len(encode_point(report(0))) + 3)]
)
async def test_only_newest_points_stay(store: RunStore, limit: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("memory_store", "redis_store"):
        monkeypatch.setattr(f"solrl_rollout.store.{name}.{limit}", most)
    for i in range(7):
        await store.add_iteration(TENANT, "run-a", report(i))
    assert await told(store) == [3, 4, 5, 6]
    for i in (5, 6, 7):
        await store.add_iteration(TENANT, "run-a", report(i))
    assert await told(store) == [4, 5, 6, 7]
    await store.add_iteration(TENANT, "run-a", report(8, rewards={"x" * 100: {"mean": 0, "best": 0, "worst": 0}}))
    assert await told(store) == ([5, 6, 7, 8] if limit == "KEPT_POINTS" else [6, 7, 8])


async def test_a_report_that_is_too_large_is_refused(store: RunStore) -> None:
    spread = {"mean": 0.1, "best": 0.2, "worst": 0.3}
    names = [f"{i:02}" + "é" * 126 for i in range(16)]
    settings = {"trained": {"clipscore": 1}, "values": {f"s{i}": "é" * 256 for i in range(16)}}
    large = report(0, rewards=dict.fromkeys(names, spread), seconds=dict.fromkeys(names, 1.5), settings=settings)
    problem = await refusal(store.add_iteration(TENANT, "run-a", large))
    assert (problem.status, problem.kind) == (422, "invalid-request")
    assert await told(store) == []
    usual = report(0, rewards={f"reward_{i}": spread for i in range(16)}, seconds={f"step_{i}": 1.5 for i in range(16)})
    await store.add_iteration(TENANT, "run-a", usual)
    assert await told(store) == [0]


async def test_revisions_grow_even_if_redis_clock_steps_back(empty_redis_url: str) -> None:
    store = open_store(empty_redis_url)
    for run in ("run-a", "run-b"):
        await fill(store, 1, run=run)
    ahead = 5 * 10**15  # a century
    with redis.Redis.from_url(empty_redis_url) as client:
        client.set("solrl:{tenant-a}:revision", ahead)
    found = [await store.add_iteration(TENANT, run, report(0)) for run in ("run-a", "run-b")]
    assert found == [ahead + 1, ahead + 2]
    await store.close()


async def test_an_unknown_run_cannot_report_and_a_deleted_one_is_forgotten(store: RunStore) -> None:
    for tenant, run in ((TENANT, "nobody"), ("tenant-b", "run-a")):
        assert (await refusal(store.add_iteration(tenant, run, report(0)))).kind == "run-not-found"
        assert (await refusal(store.iterations(tenant, run))).kind == "run-not-found"
    await store.add_iteration(TENANT, "run-a", report(0, samples=samples(0)))
    assert await store.samples("tenant-b", "run-a") is None
    assert await store.progress("tenant-b", ["run-a"]) == {}
    await store.delete(TENANT, "run-a")
    assert (await refusal(store.iterations(TENANT, "run-a"))).kind == "run-not-found"
    await fill(store, 1)
    assert await told(store) == []
    assert await store.samples(TENANT, "run-a") is None
    assert await store.progress(TENANT, ["run-a"]) == {}


async def test_a_report_writes_these_keys_and_a_deleted_run_leaves_none_of_its_own(
    empty_redis_url: str,
) -> None:
    store = open_store(empty_redis_url)
    await fill(store, 3)
    with redis.Redis.from_url(empty_redis_url) as client:
        before = set(client.keys())
        await store.add_iteration(TENANT, "run-a", report(0, samples=samples(0)))
        added = {key.decode() for key in set(client.keys()) - before}
        run = {"solrl:{tenant-a}:run:run-a:iterations", "solrl:{tenant-a}:run:run-a:progress"}
        assert added == run | {"solrl:{tenant-a}:revision"}
        await store.delete(TENANT, "run-a")
        assert set(client.keys()) == {b"solrl:{tenant-a}:revision"}
    await store.close()
