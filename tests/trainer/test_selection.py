"""Selection: the kept candidates of a group."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from solrl_proto.rollouts import PromptItem
from solrl_trainer.rollouts.groups import CandidateGroup
from solrl_trainer.rollouts.selection import best_worst, select
from solrl_trainer.settings.rollout_sections import Explore


@pytest.mark.parametrize(
    ("rewards", "count", "kept"),
    [
        ([0.1, 0.9, 0.5, 0.3, 0.7, 0.2], 4, [1, 4, 5, 0]),
        ([0.1, 0.9, 0.5, 0.3, 0.7, 0.2], 3, [1, 5, 0]),
        ([0.1, 0.9, 0.5, 0.3], 4, [1, 2, 3, 0]),
        ([0.5, 1.0, 0.5, 1.0, 0.5, 0.0], 2, [1, 5]),
        ([1.0] * 6, 4, [0, 1, 4, 5]),
        ([1.0, 1.0 + 1e-12, 1.0 - 1e-12], 2, [1, 2]),
    ],
    ids=["best before worst", "an odd count", "all", "a tie of the best", "equal rewards", "close doubles"],
)
def test_the_best_come_before_the_worst(rewards: list[float], count: int, kept: list[int]) -> None:
    assert best_worst(rewards, count) == kept


def test_tensors_of_any_dtype_are_accepted() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        assert best_worst(torch.tensor([1, 9, 5, 3], dtype=dtype), 2) == [1, 0]
    assert all(isinstance(i, int) for i in best_worst(torch.rand(5), 2))


@given(rewards=st.lists(st.floats(-10, 10), min_size=2, max_size=96), share=st.floats(0, 1))
def test_no_omitted_candidate_is_above_the_best_or_below_the_worst(rewards: list[float], share: float) -> None:
    count = 2 + round(share * (len(rewards) - 2))
    kept = best_worst(rewards, count)
    assert len(kept) == len(set(kept)) == count
    best, worst = kept[: count // 2], kept[count // 2 :]
    left = [r for i, r in enumerate(rewards) if i not in kept]
    values = [rewards[i] for i in kept]
    assert values == sorted(values, reverse=True)
    assert all(rewards[i] >= r for i in best for r in left)
    assert all(rewards[i] <= r for i in worst for r in left)


def test_a_count_out_of_range_and_a_non_finite_reward_are_refused() -> None:
    for count in (-1, 0, 1, 5):
        with pytest.raises(ValueError, match=f"count {count} of 4 candidates"):
            best_worst([1.0, 2.0, 3.0, 4.0], count)
    for bad in (math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match="for candidate 2"):
            best_worst([1.0, 2.0, bad, bad], 2)


def test_a_selection_has_the_best_and_the_worst() -> None:
    group = CandidateGroup(PromptItem(id="p", text="a red circle"), range(10, 15), (0.1, 0.4, 0.5, 0.3, 0.2))
    selection = select(group, Explore(keep=2))
    assert (selection.seeds, selection.scores) == ([12, 10], [0.5, 0.1])
    assert selection.samples is None
