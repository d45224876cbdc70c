"""Runs take turns by cost; the queue is bounded; what is dropped leaves no trace."""

from dataclasses import dataclass

import pytest
from solrl_rollout.queue import FairQueue, QueueFull


@dataclass(frozen=True, eq=False)
class Item:
    run: str | None
    candidates: int = 1
    steps: int = 1
    job: str = ""

    @property
    def cost(self) -> int:
        return self.candidates * self.steps


def queue_of(*items: Item, limit: int = 1000) -> FairQueue[Item]:
    queue: FairQueue[Item] = FairQueue(limit)
    queue.put(items)
    return queue


def taken(queue: FairQueue[Item], count: int | None = None) -> list[str | None]:
    runs: list[str | None] = []
    while (count is None or len(runs) < count) and (item := queue.take()) is not None:
        runs.append(item.run)
    return runs


def test_an_empty_queue_gives_nothing() -> None:
    assert queue_of().take() is None
    assert not queue_of()


def test_a_run_keeps_the_order_of_its_items() -> None:
    items = [Item("a", job=str(i)) for i in range(5)]
    queue = queue_of(*items)
    assert [queue.take() for _ in items] == items


def test_runs_of_equal_cost_alternate() -> None:
    queue = queue_of(*[Item("a")] * 3, *[Item("b")] * 3)
    assert sorted(map(str, taken(queue, 2))) == ["a", "b"]
    assert sorted(map(str, taken(queue, 2))) == ["a", "b"]


def test_turns_go_by_cost_and_not_by_items() -> None:
    queue = queue_of(*[Item("big", 24, 10)] * 4, *[Item("small", 8, 10)] * 12)
    served = taken(queue, 8)
    assert (served.count("big"), served.count("small")) == (2, 6)


def test_steps_count_as_cost() -> None:
    queue = queue_of(*[Item("long", 4, 30)] * 4, *[Item("short", 4, 10)] * 12)
    served = taken(queue, 8)
    assert (served.count("long"), served.count("short")) == (2, 6)


def test_a_small_run_waits_for_one_chunk_of_a_big_one_only() -> None:
    queue = queue_of(*[Item("big", 24, 6)] * 30)
    assert taken(queue, 10) == ["big"] * 10
    queue.put([Item("small", 4, 6)])
    assert "small" in taken(queue, 2)


def test_a_newcomer_has_no_credit_for_the_time_it_was_away() -> None:
    queue = queue_of(*[Item("old")] * 100)
    taken(queue, 50)
    queue.put([Item("new")] * 50)
    assert 9 <= taken(queue, 20).count("new") <= 11


def test_a_run_that_returns_keeps_its_debt() -> None:
    queue = queue_of(Item("greedy", 24, 10), *[Item("patient")] * 100)
    while "greedy" not in taken(queue, 1):
        pass
    queue.put([Item("greedy", 24, 10)])
    assert taken(queue, 90) == ["patient"] * 90


def test_a_tie_goes_to_the_run_served_last() -> None:
    queue = queue_of(Item("a"), Item("a"), Item("b"), Item("b"))
    served = taken(queue)
    assert served in (["a", "b", "b", "a"], ["b", "a", "a", "b"])


def test_requests_without_an_adapter_share_one_turn() -> None:
    queue = queue_of(*[Item(None, job=str(i)) for i in range(10)], *[Item("a")] * 10)
    served = taken(queue, 10)
    assert served.count("a") == 5


def test_too_much_is_refused_whole() -> None:
    queue = queue_of(Item("a", 6), limit=10)
    with pytest.raises(QueueFull):
        queue.put([Item("b", 2), Item("b", 3)])
    assert taken(queue) == ["a"]
    queue.put([Item("b", 5), Item("b", 5)])
    assert queue.candidates == 10


def test_taking_makes_room() -> None:
    queue = queue_of(Item("a", 6), Item("a", 4), limit=10)
    queue.take()
    queue.put([Item("b", 6)])
    assert (queue.candidates, queue.cost) == (10, 10)


def test_dropping_removes_a_job_from_everywhere_and_nothing_else() -> None:
    keep, gone = Item("a", job="keep"), Item("a", 5, job="gone")
    queue = queue_of(gone, keep, Item("b", 7, job="gone"), gone, limit=20)
    assert len(queue.drop(lambda item: item.job == "gone")) == 3
    assert (queue.candidates, queue.cost) == (1, 1)
    assert queue.take() is keep
    assert not queue


def test_what_was_dropped_is_not_charged() -> None:
    queue = queue_of(*[Item("a", 24, 100, job="gone")] * 5)
    queue.drop(lambda item: item.job == "gone")
    queue.put([Item("b"), Item("b"), Item("a"), Item("a")])
    assert sorted(map(str, taken(queue, 2))) == ["a", "b"]


def test_a_queue_forgets_runs_that_owe_nothing() -> None:
    queue = queue_of()
    for i in range(100):
        queue.put([Item(f"run-{i}")])
        queue.take()
    assert len(queue._served) < 5
