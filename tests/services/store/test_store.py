"""One contract for every store: versions are immutable, increase, and are read back unchanged."""

import asyncio

import pytest
from solrl_proto.problems import ProblemError
from solrl_rollout.store import RunStore, open_store
from solrl_rollout.store.errors import StoreUrlError
from tests.services.store_helpers import TENANT, adapter, fill, kept, refusal

pytestmark = pytest.mark.anyio


async def test_a_version_is_read_back_unchanged(store: RunStore) -> None:
    info, body = adapter(0, None)
    await store.ping()
    assert await store.put(TENANT, info, body) == (info, True)
    assert await store.get(TENANT, "run-a", 0) == (info, body)
    assert await store.info(TENANT, "run-a", 0) == info
    assert await store.head(TENANT, "run-a") == 0
    assert await store.head(TENANT, "nobody") is None
    held = await store.list(TENANT, "run-a")
    assert (held.run, held.head, held.versions) == ("run-a", 0, (info,))


async def test_the_largest_versions_keep_every_digit(store: RunStore) -> None:
    last = 2**53 - 1
    for version, parent in [(last - 2, None), (last - 1, last - 2), (last, last - 1)]:
        await store.put(TENANT, *adapter(version, parent))
    assert await kept(store) == [last - 2, last - 1, last]


async def test_a_stored_version_may_be_put_again_and_others_conflict(store: RunStore) -> None:
    """The same bytes may have any parent, and be behind the head."""
    problem = await refusal(store.put(TENANT, *adapter(5, 4)))
    assert (problem.status, problem.kind, problem.got, problem.expected) == (409, "parent-conflict", 4, None)
    await fill(store, 2)
    for version, parent in ((0, None), (1, 0)):
        stored, new = await store.put(TENANT, *adapter(version, 7))
        assert (stored.parent, new) == (parent, False)
    for other in (adapter(1, 0, "other bytes"), adapter(1, 0, model="other")):
        problem = await refusal(store.put(TENANT, *other))
        assert (problem.status, problem.kind) == (409, "version-conflict")
    for parent in (None, 0, 3):
        problem = await refusal(store.put(TENANT, *adapter(5, parent)))
        assert (problem.status, problem.kind, problem.got, problem.expected) == (409, "parent-conflict", parent, 1)
    assert await store.get(TENANT, "run-a", 1) == adapter(1, 0)
    assert await kept(store) == [0, 1]


async def test_only_the_newest_versions_are_retained_and_older_ones_cannot_come_back(store: RunStore) -> None:
    await fill(store, 12)
    problem = await refusal(store.get(TENANT, "run-a", 8))
    assert (problem.status, problem.kind, problem.expected) == (404, "version-not-found", [9, 10, 11])
    assert "head is 11" in problem.detail
    problem = await refusal(store.put(TENANT, *adapter(1, 0)))
    assert (problem.status, problem.kind) == (409, "version-conflict")
    assert await kept(store) == [9, 10, 11]


async def test_missing_runs_and_versions_are_404_and_tenants_do_not_see_each_other(store: RunStore) -> None:
    await fill(store, 2)
    problem = await refusal(store.info(TENANT, "run-a", 7))
    assert (problem.status, problem.kind) == (404, "version-not-found")
    assert (problem.got, problem.expected) == (7, [0, 1])
    for tenant, run in ((TENANT, "nobody"), ("tenant-b", "run-a")):
        doings = (
            store.get(tenant, run, 0),
            store.info(tenant, run, 0),
            store.list(tenant, run),
            store.delete(tenant, run),
        )
        for doing in (*doings, store.rewind(tenant, run, 0, 1)):
            problem = await refusal(doing)
            assert (problem.status, problem.kind) == (404, "run-not-found")
    await store.put("tenant-b", *adapter(7, None, "theirs"))
    assert await kept(store) == [0, 1]
    assert [run.head for run in (await store.runs("tenant-b")).runs] == [7]
    assert (await store.runs("nobody")).runs == ()


async def test_a_run_is_rewound_to_a_stored_version(store: RunStore) -> None:
    await fill(store, 6)
    problem = await refusal(store.rewind(TENANT, "run-a", 2, 5))
    assert (problem.status, problem.kind, problem.expected) == (404, "version-not-found", [3, 4, 5])
    problem = await refusal(store.rewind(TENANT, "run-a", 3, 4))
    assert (problem.status, problem.kind, problem.got, problem.expected) == (409, "head-conflict", 4, 5)
    assert await kept(store) == [3, 4, 5]
    await store.rewind(TENANT, "run-a", 3, 5)
    listed = await store.list(TENANT, "run-a")
    assert (listed.head, [info.version for info in listed.versions]) == (3, [3])
    assert (await store.runs(TENANT)).size == sum(info.size for info in listed.versions)
    await store.rewind(TENANT, "run-a", 3, 5)  # repeated, as after a lost answer
    assert (await refusal(store.put(TENANT, *adapter(6, 5)))).kind == "parent-conflict"
    info, body = adapter(4, 3, body=b"another")
    await store.put(TENANT, info, body)
    assert await store.get(TENANT, "run-a", 4) == (info, body)


async def test_a_deleted_run_can_be_started_again(store: RunStore) -> None:
    await fill(store, 3)
    await fill(store, 1, run="run-b")
    await store.delete(TENANT, "run-a")
    assert (await refusal(store.list(TENANT, "run-a"))).kind == "run-not-found"
    listed = await store.runs(TENANT)
    assert ([run.run for run in listed.runs], listed.size) == (["run-b"], adapter(0, None)[0].size)
    await store.put(TENANT, *adapter(0, None))
    assert await kept(store) == [0]


async def test_a_tenants_bytes_are_counted_and_limited(store: RunStore) -> None:
    store.quota = 450
    for version in range(4):
        await store.put(TENANT, *adapter(version, version - 1 if version else None, body=bytes([version]) * 100))
    assert (await store.runs(TENANT)).size == 300
    await store.put(TENANT, *adapter(0, None, run="run-b", body=bytes(150)))
    refused = adapter(1, 0, run="run-b", body=bytes(1))
    problem = await refusal(store.put(TENANT, *refused))
    assert (problem.status, problem.kind, problem.got) == (413, "adapter-quota", "451 bytes with this one")
    assert await kept(store, "run-b") == [0]
    # A version that replaces an old one of the same size fits, and so does another tenant's version.
    await store.put(TENANT, *adapter(4, 3, body=bytes([4]) * 100))
    await store.put("tenant-b", *adapter(0, None, body=bytes(400)))
    await store.rewind(TENANT, "run-a", 3, 4)
    await store.put(TENANT, *adapter(0, None, run="run-c", body=bytes(100)))
    assert (await refusal(store.put(TENANT, *refused))).got == "451 bytes with this one"
    await store.delete(TENANT, "run-c")
    await store.delete(TENANT, "run-a")
    await store.put(TENANT, *refused)
    held = await store.runs(TENANT)
    assert (held.size, held.quota) == (151, 450)
    assert await store.sizes() == {TENANT: 151, "tenant-b": 400}


@pytest.mark.parametrize("versions", [[1] * 8, [1, 2, 3, 4, 5, 6, 7, 8]], ids=["same-version", "own-versions"])
async def test_of_concurrent_puts_on_one_parent_exactly_one_wins(store: RunStore, versions: list[int]) -> None:
    await fill(store, 1)
    rivals = [adapter(version, 0, f"rival {i}") for i, version in enumerate(versions)]
    outcomes = await asyncio.gather(*(store.put(TENANT, *rival) for rival in rivals), return_exceptions=True)
    winners = [rival for rival, outcome in zip(rivals, outcomes, strict=True) if outcome == (rival[0], True)]
    losers = [outcome.problem.kind for outcome in outcomes if isinstance(outcome, ProblemError)]
    assert (len(winners), len(losers)) == (1, 7)
    assert set(losers) <= {"version-conflict", "parent-conflict"}
    version = winners[0][0].version
    assert await store.get(TENANT, "run-a", version) == winners[0]
    assert await kept(store) == [0, version]


async def test_concurrent_puts_of_the_same_bytes_all_succeed(store: RunStore) -> None:
    info, body = adapter(0, None)
    outcomes = await asyncio.gather(*(store.put(TENANT, info, body) for _ in range(8)))
    assert [stored for stored, _ in outcomes] == [info] * 8
    assert sum(new for _, new in outcomes) == 1
    assert await store.get(TENANT, "run-a", 0) == (info, body)


@pytest.mark.parametrize(
    "url", ["", "s3cret", "http://s3cret@h", *(f"redis://:s3cret{end}" for end in ("/x@h", "@h:port", "@h?what=1"))]
)
async def test_a_url_of_an_unknown_store_is_refused_without_quoting_it(url: str) -> None:
    with pytest.raises(StoreUrlError, match="redis://") as caught:
        open_store(url)
    assert "s3cret" not in str(caught.value)
