"""Rank fidelity on groups small enough to count by hand."""

import math

import pytest
import torch
from solrl_core.fidelity import correlation, end_ranks, rank_fidelity, separations


@pytest.mark.parametrize(("scale", "sign", "overlap", "ranks"), [(5, 1, 1.0, (6.5, 90.5)), (-1, -1, 0.0, (90.5, 6.5))])
def test_the_same_order_is_perfect(scale: float, sign: int, overlap: float, ranks: tuple[float, float]) -> None:
    true = torch.rand(3, 96, generator=torch.Generator().manual_seed(0))
    found = rank_fidelity(true * scale - 2, true)
    assert found.spearman == pytest.approx(sign)
    assert found.top_overlap == found.bottom_overlap == dict.fromkeys((4, 8, 12), overlap)
    assert (found.top_rank, found.bottom_rank) == ranks


def test_a_group_counted_by_hand() -> None:
    # True ranks 1…8 in order; the proxy swaps the 4th with the 6th and the 1st with the 2nd.
    true = torch.tensor([[8.0, 7, 6, 5, 4, 3, 2, 1]])
    proxy = torch.tensor([[7.0, 8, 6, 3, 4, 5, 2, 1]])
    found = rank_fidelity(proxy, true, keep=8)
    # Spearman: 1 − 6·Σd²/(n(n² − 1)) with d² = 1 + 1 + 4 + 4.
    assert found.spearman == pytest.approx(1 - 6 * 10 / (8 * 63))
    assert found.top_overlap == {4: 0.75}
    assert found.bottom_overlap == {4: 0.75}
    assert found.top_rank == pytest.approx((1 + 2 + 3 + 6) / 4)
    assert found.bottom_rank == pytest.approx((4 + 5 + 7 + 8) / 4)


def test_groups_are_ranked_within_themselves_and_averaged() -> None:
    first = torch.tensor([8.0, 7, 6, 5, 4, 3, 2, 1])
    true = torch.stack([first, first])
    # A group far above the other changes nothing; one perfect and one turned group average to nought.
    found = rank_fidelity(torch.stack([first + 100, -first]), true, keep=4)
    assert found.spearman == pytest.approx(0)
    assert found.top_rank == found.bottom_rank == pytest.approx((1.5 + 7.5) / 2)
    assert found.top_overlap == found.bottom_overlap == {}


@pytest.mark.parametrize(
    ("proxy", "true", "keep"),
    [((1, 8), (1, 9), 4), ((8,), (8,), 4), ((2, 8), (1, 8), 4), ((1, 8), (1, 8), 9), ((1, 1, 8), (1, 1, 8), 4)],
)
def test_shapes_that_do_not_fit_are_refused(proxy: tuple[int, ...], true: tuple[int, ...], keep: int) -> None:
    with pytest.raises(ValueError, match=r"expected equal \[groups, candidates\]"):
        rank_fidelity(torch.rand(proxy), torch.rand(true), keep=keep)


@pytest.mark.filterwarnings("error")
def test_equal_rewards_share_their_rank_are_no_correlation_and_warn_of_nothing() -> None:
    true = torch.tensor([[1.0, 1, 1, 0, 0, 0]])
    found = rank_fidelity(torch.tensor([[6.0, 5, 4, 3, 2, 1]]), true, keep=2)
    assert (found.top_rank, found.bottom_rank) == (2.0, 5.0)
    true = torch.tensor([[8.0, 7, 6, 5, 4, 3, 2, 1]])
    found = rank_fidelity(torch.ones_like(true), true, keep=4)
    assert found.spearman == 0
    equal = 0.2 + 1e-7 * true
    assert math.isnan(rank_fidelity(true, equal, keep=4).spearman)
    assert math.isnan(correlation(true[0], equal[0]))
    assert correlation(equal[0], true[0]) == 0
    assert end_ranks(equal[0], true[0], 1) == (1, 8)
    together = rank_fidelity(torch.cat([true, true]), torch.cat([true, equal]), keep=4)
    assert together.spearman == pytest.approx(1), "a group that ranks nothing does not count"


def test_perfect_ranks_are_those_that_ties_allow_and_many_best_are_a_saturated_reward() -> None:
    # Ranks 1…6 are equal, 3.5 each; 7 and 8 follow.
    true = torch.tensor([[1.0, 1, 1, 1, 1, 1, 0.5, 0.25], [8.0, 7, 6, 5, 4, 3, 2, 1]])
    found = rank_fidelity(true[:1], true[:1], keep=4)
    assert (found.top_rank, found.bottom_rank) == (found.perfect_top, found.perfect_bottom) == (3.5, 7.5)
    assert (found.best_share, found.saturated, found.separation) == (0.75, True, 1)
    assert separations(true, true, keep=4).tolist() == [1, 1]
    assert separations(-true, true, keep=4)[0] == pytest.approx(-1)
    assert separations(true, torch.ones_like(true), keep=4).tolist() == [1, 1], "nothing to tell apart"
    both = rank_fidelity(true, true, keep=4)
    assert (both.best_share, both.saturated) == (pytest.approx(7 / 16), False)
