"""Runs take turns by cost; the queue is bounded; removed work leaves no trace."""

import itertools
import random
import weakref
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import pytest
from solrl_rollout.engine.queue.fair_queue import FairQueue, Quantum, QueueFullError
from solrl_rollout.engine.queue.scheduler import StepCosts


@dataclass(frozen=True, eq=False)
class Item:
    run: Hashable
    candidates: int = 1
    steps: int = 1
    job: str = ""
    tenant: str = "t"

    @property
    def cost(self) -> int:
        return self.candidates * self.steps


def items(count: int, run: Hashable, candidates: int = 1, steps: int = 1, tenant: str = "t") -> list[Item]:
    return [Item(run, candidates, steps, tenant=tenant) for _ in range(count)]


def queue_of(*items: Item, limit: int = 1000, turn: int = 1, tenant_limit: int | None = None) -> FairQueue:
    queue: FairQueue = FairQueue(limit, turn=turn, tenant_limit=tenant_limit)
    queue.put(items)
    return queue


def taken(queue: FairQueue, count: int | None = None) -> list[object]:
    runs: list[object] = []
    while (count is None or len(runs) < count) and (item := queue.pop()) is not None:
        runs.append(item.run)
    return runs


def test_lost_items_return_to_the_front_beyond_the_limit() -> None:
    first, second = (Item("a", 2, job=f"request {i}") for i in range(2))
    queue = queue_of(first, second, limit=5)
    assert queue.pop() is first
    queue.put([last := Item("a", 3)])
    queue.put_back(first)
    assert [queue.pop() for _ in range(3)] == [first, second, last]


def test_turns_depend_on_the_measured_time_of_a_step() -> None:
    costs = StepCosts()
    for kind, seconds in (("small", 99.0), ("large", 99.0), ("small", 0.02), ("large", 0.06)):
        costs.record(kind, seconds)  # the first measurement of each kind is ignored
    assert [costs.weight(kind) for kind in ("small", "large", "new")] == [1.0, pytest.approx(3.0), 1.0]
    queue: FairQueue = FairQueue(1000, weight=lambda item: costs.weight(item.run))
    queue.put([*items(20, "large", 8), *items(20, "small", 8)])
    served = taken(queue, 20)
    assert (served.count("large"), served.count("small")) == (5, 15)
    costs.record("large", 0.12)  # a kind that becomes slower gradually costs more
    assert costs.weight("large") == pytest.approx(3.3)
    costs.record("small", 0.04)
    assert costs.weight("large") == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("turn", "runs", "before", "tenant", "within"), [(1, 1, 10, "t", 2), (4, 1, 9, "t", 1), (4, 260, 10, "idle", 2)]
)
def test_a_new_small_flow_waits_for_only_one_chunk(turn: int, runs: int, before: int, tenant: str, within: int) -> None:
    queue = queue_of(*[Item(f"big-{n % runs}", 24, 6) for n in range(30 * runs)], limit=10**6, turn=turn)
    assert len(taken(queue, before)) == before
    queue.put([Item("small", 4, 6, tenant=tenant)])
    assert "small" in taken(queue, within)


def test_a_new_flow_has_no_credit_for_its_absence_and_one_that_returns_keeps_its_debt() -> None:
    queue = queue_of(*items(100, "old"))
    taken(queue, 50)
    queue.put(items(50, "new"))
    assert 9 <= taken(queue, 20).count("new") <= 11
    queue = queue_of(Item("greedy", 24, 10), *items(100, "patient"))
    while "greedy" not in taken(queue, 1):
        pass
    queue.put([Item("greedy", 24, 10)])
    assert taken(queue, 90) == ["patient"] * 90


def refused(queue: FairQueue, *items: Item) -> tuple[int, int, str | None]:
    """What is waiting, the limit and its tenant, as the queue's refusal of these items says."""
    with pytest.raises(QueueFullError) as full:
        queue.put(items)
    return full.value.waiting, full.value.limit, full.value.tenant


def test_items_beyond_the_limit_of_all_or_of_their_tenant_are_refused_as_a_whole() -> None:
    queue = queue_of(Item("a", 6), limit=16, tenant_limit=10)
    assert refused(queue, Item("b", 2), Item("b", 3)) == (6, 10, "t")
    queue.put([Item("c", 5, tenant="other")])
    assert refused(queue, Item("c", 2, tenant="other"), Item("b", 4)) == (11, 16, None)
    assert taken(queue) == ["a", "c"]
    queue.put([Item("b", 5), Item("b", 5)])
    assert queue.by_tenant == {"t": 10}


def test_a_turn_has_several_consecutive_items() -> None:
    queue = queue_of(*items(8, "a"), *items(8, "b"), turn=4)
    served = taken(queue)
    changes = sum(one != next_one for one, next_one in itertools.pairwise(served))
    assert changes <= 5
    assert sorted(served[:9]).count("a") in (4, 5)


def test_removing_a_job_removes_all_its_items_and_no_others() -> None:
    keep, last = Item("a", job="keep"), Item("c", job="last")
    gone = [Item("a", 5, job="gone"), Item("b", 7, job="gone"), Item("a", 5, job="gone")]
    queue = queue_of(gone[0], keep, *gone[1:], last, limit=20)
    assert queue.remove("gone") == gone
    assert queue.remove("gone") == []
    assert (queue.by_tenant, queue.cost) == ({"t": 2}, 2)
    assert queue.pop() is keep
    assert queue.clear() == [last]
    assert not queue.by_tenant


class CountedItem(Item):
    """An item that counts how often any is read."""

    reads = 0

    def __getattribute__(self, name: str) -> object:
        CountedItem.reads += 1
        return super().__getattribute__(name)


def test_the_work_of_a_request_does_not_grow_with_what_its_tenant_has_waiting() -> None:
    """Requests are queued and cancelled on the event loop, where all tenants wait for them."""

    def reads(waiting: int) -> int:
        queue = queue_of(*[CountedItem("a") for _ in range(waiting)], limit=10**6)
        CountedItem.reads = 0
        queue.put([CountedItem("a", job="request") for _ in range(20)])
        assert len(queue.remove("request")) == 20
        return CountedItem.reads

    assert reads(waiting=3000) == reads(waiting=30)


def test_a_queue_forgets_runs_without_debt() -> None:
    class Run:
        pass

    queue, runs = queue_of(), weakref.WeakSet[Run]()
    for _ in range(100):
        run = Run()
        runs.add(run)
        queue.put([Item(run)])
        queue.pop()
    del run
    assert len(runs) < 5


def chunks_until_done(queue: FairQueue, victim: list[Item], fresh: Callable[[int], Item], in_flight: int) -> int:
    """Chunks served until the victim's are, while `in_flight` requests of other runs, each with a new name, wait."""
    names = itertools.count()
    queue.put([fresh(next(names)) for _ in range(in_flight)])
    for _ in range(8):
        queue.pop()
        queue.put([fresh(next(names))])
    queue.put(victim)
    left, served = len(victim), 0
    while left:
        item = queue.pop()
        served += 1
        if item in victim:
            left -= 1
        else:
            queue.put([fresh(next(names))])
    return served


@pytest.mark.parametrize(
    ("in_flight", "patient", "most"), [(1, "patient", 42), (3, "patient", 42), (50, "patient", 42), (30, "t", 130)]
)
def test_a_new_run_name_each_request_starves_no_other_tenant_or_run(in_flight: int, patient: str, most: int) -> None:
    queue: FairQueue = FairQueue(10**6, turn=4)
    victim = [Item("steady", 24, 6, tenant=patient) for _ in range(20)]
    assert chunks_until_done(queue, victim, lambda n: Item(f"run-{n}", 24, 6), in_flight) <= most


def test_tenants_have_equal_shares_regardless_of_their_number_of_runs() -> None:
    many = [Item(f"run-{n % 9}", 24, 6, tenant="many") for n in range(900)]
    queue = queue_of(*many, *items(900, "only", 24, 6, tenant="one"), limit=10**6, turn=4)
    assert 190 <= taken(queue, 400).count("only") <= 210


def test_a_cost_measured_later_is_charged_to_its_tenant_and_run() -> None:
    queue = queue_of(*items(100, "heavy", tenant="a"), *items(100, "light", tenant="b"), limit=10_000)
    served = []
    for _ in range(40):
        item = queue.pop()
        assert item is not None
        served.append(item.run)
        if item.run == "heavy":
            queue.charge(item, 3.0)
    assert 8 <= served.count("heavy") <= 12


def served(servers: int, runs: int, takes: int, chance: random.Random, *, sticky: bool = True) -> list[list[object]]:
    """Runs that each of several servers takes, in random order of the servers; each run always has more items."""
    queue = queue_of(*(Item(run) for _ in range(takes) for run in range(runs)), limit=takes * runs, turn=4)
    turns = [Quantum(sticky=sticky) for _ in range(servers)]
    found: list[list[object]] = [[] for _ in turns]
    for _ in range(takes):
        server = chance.randrange(servers)
        item = queue.pop(turns[server])
        assert item is not None
        found[server].append(item.run)
    return found


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("servers", "runs"), [(2, 8), (2, 3), (8, 3), (3, 1)])
def test_several_servers_share_the_runs_equally(servers: int, runs: int, seed: int) -> None:
    takes = 400
    counts = Counter(itertools.chain(*served(servers, runs, takes, random.Random(seed))))
    for run in range(runs):
        assert counts[run] == pytest.approx(takes / runs, rel=0.1, abs=4)


@pytest.mark.parametrize("runs", [2, 3, 8])
def test_several_servers_change_runs_less_often_if_they_keep_them(runs: int) -> None:
    def changes(sticky: bool) -> int:
        found = served(2, runs, 400, random.Random(3), sticky=sticky)
        return sum(one != other for taken in found for one, other in itertools.pairwise(taken))

    kept, left = changes(sticky=True), changes(sticky=False)
    assert kept < 0.7 * left


def test_an_item_that_is_put_back_is_next_and_its_run_pays_once() -> None:
    queue = queue_of(*(Item(run, job=f"{run}{i}") for i in range(3) for run in "ab"), turn=1)
    first = queue.pop()
    assert first is not None
    before = queue.by_tenant.copy(), queue.cost
    again = queue.pop()
    assert again is not None
    queue.put_back(again)
    assert (queue.by_tenant, queue.cost) == before
    assert queue.pop() is again
    assert taken(queue) == ["b", "a", "a", "b"]  # a tie: the run served last is next


@pytest.mark.parametrize("tenant", ["t", "other"])
@pytest.mark.parametrize("before", [False, True])
def test_a_new_flow_waits_for_no_work_that_is_put_back(before: bool, tenant: str) -> None:
    queue = queue_of(*items(4, "big", 24, 6), turn=4)
    first, second, *_ = (queue.pop() for _ in range(4))
    assert first is not None
    assert second is not None
    small = Item("small", 4, 2, tenant=tenant)
    if before:
        queue.put([small])
    for lost in (second, first):
        queue.put_back(lost)
    if not before:
        queue.put([small])
    assert [queue.pop() for _ in range(3)] == [small, first, second]


def test_a_run_that_must_wait_lets_others_pass_loses_nothing_and_pays_nothing() -> None:
    queue = queue_of(*items(2, "slow"), *items(2, "a"), Item("slow", tenant="u"), Item("b", tenant="u"), turn=4)
    turn = Quantum()
    first = queue.pop(turn)
    assert first is not None
    assert first.run == "slow"
    passed = [queue.pop(turn, lambda item: item.run == "slow") for _ in range(4)]
    assert [item and (item.tenant, item.run) for item in passed] == [("u", "b"), ("t", "a"), ("t", "a"), None]
    assert queue.by_tenant == {"t": 1, "u": 1}
    assert taken(queue) == ["slow", "slow"]
    queue = queue_of(*(Item(run) for run in "aaaabbbb"))
    assert queue.pop() is not None  # of a
    passed = [queue.pop(skip=lambda item: item.run == "a") for _ in range(3)]
    assert [item and item.run for item in passed] == ["b"] * 3
    assert taken(queue) == ["a", "a", "a", "b"]
    queue.put([Item("a")])
    assert queue.pop(skip=lambda item: item.run == "a") is None
    assert taken(queue) == ["a"]


def test_a_new_flow_that_is_passed_over_remains_one() -> None:
    queue = queue_of(*(Item("a") for _ in range(8)), turn=4)
    assert taken(queue, 1) == ["a"]
    queue.put([Item("z", tenant="other"), Item("b")])
    passed = [queue.pop(skip=lambda item: item.run != "a") for _ in range(2)]
    assert [item and item.run for item in passed] == ["a", "a"]
    assert taken(queue, 3) == ["z", "b", "a"], "within a turn of a"


def test_every_item_is_taken_however_often_it_was_passed_over() -> None:
    chance = random.Random(0)
    items = [Item(f"{tenant}{run}", tenant=tenant, steps=n) for tenant in "tu" for run in "ab" for n in (1, 2, 3)]
    queue, found = queue_of(*items, turn=2), list[Item]()
    while queue.by_tenant:
        able = set(chance.sample(["ta", "tb", "ua", "ub"], 2))
        if (item := queue.pop(skip=lambda item, able=able: item.run not in able)) is not None:  # type: ignore[misc]
            assert item.run in able
            found.append(item)
    assert sorted(map(id, found)) == sorted(map(id, items))
    assert (queue.by_tenant, queue.cost) == ({}, 0)
