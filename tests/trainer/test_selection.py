"""Which candidates of a group are kept."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from solrl_trainer.selection import best_worst


def test_the_best_come_first_then_the_worst() -> None:
    assert best_worst([0.1, 0.9, 0.5, 0.3, 0.7, 0.2], 4) == [1, 4, 5, 0]


def test_an_odd_count_keeps_one_more_of_the_worst() -> None:
    assert best_worst([0.1, 0.9, 0.5, 0.3, 0.7, 0.2], 3) == [1, 5, 0]
    assert best_worst([0.1, 0.9, 0.5, 0.3, 0.7, 0.2], 5) == [1, 4, 3, 5, 0]


def test_keeping_all_is_the_whole_order() -> None:
    assert best_worst([0.1, 0.9, 0.5, 0.3], 4) == [1, 2, 3, 0]


def test_ties_go_to_the_lower_index() -> None:
    assert best_worst([1.0] * 6, 4) == [0, 1, 4, 5]
    assert best_worst([0.5, 1.0, 0.5, 1.0, 0.5, 0.0], 2) == [1, 5]


def test_tensors_of_any_kind_are_taken() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        assert best_worst(torch.tensor([1, 9, 5, 3], dtype=dtype), 2) == [1, 0]
    assert all(isinstance(i, int) for i in best_worst(torch.rand(5), 2))


def test_nearby_doubles_are_told_apart() -> None:
    assert best_worst([1.0, 1.0 + 1e-12, 1.0 - 1e-12], 2) == [1, 2]


@given(
    rewards=st.lists(st.floats(-10, 10), min_size=2, max_size=96),
    share=st.floats(0, 1),
)
def test_nothing_left_out_beats_the_best_nor_is_below_the_worst(rewards: list[float], share: float) -> None:
    count = 2 + round(share * (len(rewards) - 2))
    kept = best_worst(rewards, count)
    assert len(kept) == len(set(kept)) == count
    best, worst = kept[: count // 2], kept[count // 2 :]
    left = [r for i, r in enumerate(rewards) if i not in kept]
    values = [rewards[i] for i in kept]
    assert values == sorted(values, reverse=True)
    assert all(rewards[i] >= r for i in best for r in left)
    assert all(rewards[i] <= r for i in worst for r in left)


@pytest.mark.parametrize("count", [-1, 0, 1, 5])
def test_a_count_out_of_range_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=f"count {count} of 4 candidates"):
        best_worst([1.0, 2.0, 3.0, 4.0], count)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_that_is_not_finite_is_refused_by_its_index(bad: float) -> None:
    with pytest.raises(ValueError, match="for candidate 2"):
        best_worst([1.0, 2.0, bad, bad], 2)
