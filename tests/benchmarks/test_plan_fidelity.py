"""Plans decoded as trained and in FP8, on scores for which the right answer is known."""

from typing import Any

import pytest
import torch
from plan_fidelity import AFTER, FITTED, FP8, STEPS, WHOLE, Scores, judge, state
from support.plan_page import page
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


def lines_of(rows: list[dict[str, Any]]) -> list[str]:
    facts: dict[str, Any] = {name: {} for name in ("solvers", "solver", "off")}
    settings = {"command": "", "prompts": PROMPTS, "candidates": SIZE, "chosen_on": 1, "device": "cpu"}
    return page({**facts, **settings, "numerics": {"fp8": "native"}, "rows": rows}).splitlines()


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


def test_the_cheapest_plan_is_the_first_that_every_reward_allows() -> None:
    scores = scores_with(fp8=swapped((0, 36)))
    # After two of six steps, plans lose the best 12; after three fitted steps, those that keep up to 48 lose two.
    scores[state("fp8", STEPS, 2)] = swapped(*((n, 36 + n) for n in range(12)))
    scores[state("fp8", FITTED, 3)] = swapped((0, 26), (1, 27))
    lines = lines_of(judge("mini-sana", "fp8", scores))
    whole, rounded = (line for line in lines if line.startswith("| mini-sana | FP8 | ") and line.count("|") == 8)
    # Those that keep 40 or 48 lose as much as the one that keeps 32, for more steps.
    assert whole == (
        "| mini-sana | FP8 | whole | 4 fitted steps, after 3 keep 64 | 61% | +0.00 [+0.00, +0.00] "
        "| 4 fitted steps, after 3 keep 32 (56%): by 1.00, 1 of 4; "
        "4 fitted steps, after 3 keep 24 (54%): by 3.33, 1 of 4 |"
    )
    assert rounded == "| mini-sana | FP8 | fp8 | none |  |  | 4 fitted steps (67%): by 2.00, 1 of 4 |"
