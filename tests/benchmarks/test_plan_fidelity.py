"""Plans decoded as trained and in FP8, on scores for which the right answer is known."""

import pytest
import torch
from plan_fidelity import AFTER, FITTED, FP8, STEPS, WHOLE, Scores, judge, state
from support.precisions import REWARDS

SIZE, PROMPTS = 96, 3
TRUE = -torch.arange(1.0, SIZE + 1).expand(PROMPTS, len(REWARDS), SIZE)
"""Scores of candidates whose index is their rank, counted from 0."""


def scores_with(**changes: torch.Tensor) -> Scores:
    """True scores everywhere, except where the decoder is named."""
    wholes = {state("fp8", steps, until): TRUE for steps in (STEPS, FITTED) for until in (*AFTER[steps], steps)}
    rounded = {state("fp8", steps, steps, FP8): changes.get(FP8, TRUE) for steps in (STEPS, FITTED)}
    return {"true": TRUE, **wholes, **rounded}


def swapped(*pairs: tuple[int, int]) -> torch.Tensor:
    """True scores, with those of pairs of candidates exchanged in the first reward."""
    found = TRUE.clone()
    for one, other in pairs:
        found[:, 0, [one, other]] = TRUE[:, 0, [other, one]]
    return found


def test_plans_decoded_in_fp8_alone_suffer_from_their_images() -> None:
    # Selecting the candidate of true rank 61 instead of that of 1 makes the best 12 worse by 5 on average.
    rows = judge("mini-sana", "fp8", scores_with(fp8=swapped((0, 60))))
    first = [row for row in rows if row["reward"] == REWARDS[0]]
    worse = {how: [row["worse"]["top"][0] for row in first if row["decoded"] == how] for how in (WHOLE, FP8)}
    assert set(worse[WHOLE]) == {0}
    assert worse[FP8] == pytest.approx([5, 5])
    unpruned = next(row for row in first if (row["after"], row["decoded"]) == (STEPS, FP8))
    assert unpruned["worse_than_unpruned"]["top"] == (0, 0, 0)
    assert not any(row["worse"]["top"][0] for row in rows if row["reward"] != REWARDS[0])
