"""Plans decoded whole and early, on scores for which the right answer is known."""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest
import torch
from plan_fidelity import AFTER, DECODERS, FITTED, SMALLER, STEPS, Scores, judge, state
from plan_fidelity_plot import write_plot
from plan_fidelity_table import table
from rank_tables import REWARDS

SIZE, PROMPTS = 96, 3
TRUE = -torch.arange(1.0, SIZE + 1).expand(PROMPTS, len(REWARDS), SIZE)
"""Scores of candidates whose index is their rank, counted from 0."""


def scores_with(**changes: torch.Tensor) -> Scores:
    """True scores everywhere, except where the decoder is named."""
    wholes = {
        state("fp8", steps, until, way): changes.get(way, TRUE)
        for steps in (STEPS, FITTED)
        for until in (*AFTER[steps], steps)
        for way in DECODERS
    }
    return {"true": TRUE, **wholes, state("fp8", STEPS, STEPS, SMALLER): changes.get(SMALLER, TRUE)}


def swapped(*pairs: tuple[int, int]) -> torch.Tensor:
    """True scores, with those of pairs of candidates exchanged in the first reward."""
    found = TRUE.clone()
    for one, other in pairs:
        found[:, 0, [one, other]] = TRUE[:, 0, [other, one]]
    return found


def page(rows: list[dict[str, Any]]) -> list[str]:
    facts: dict[str, Any] = {name: {} for name in ("solvers", "solver", "off")}
    settings = {"command": "", "prompts": PROMPTS, "candidates": SIZE, "chosen_on": 1, "device": "cpu"}
    return table({**facts, **settings, "numerics": {"fp8": "native"}, "rows": rows}).splitlines()


def test_every_plan_has_a_twin_decoded_early_that_alone_suffers_from_its_images() -> None:
    # Selecting the candidate of true rank 61 instead of that of 1 makes the best 12 worse by 5 on average.
    rows = judge("mini-sana", "fp8", scores_with(early=swapped((0, 60)), smaller=swapped((0, 24))))
    first = [row for row in rows if row["reward"] == REWARDS[0]]
    plans = {
        how: {
            (row["steps"], row["after"], row["keep"]): row["worse"]["top"][0] for row in first if row["decoded"] == how
        }
        for how in (*DECODERS, SMALLER)
    }
    assert plans["whole"].keys() == plans["early"].keys()
    assert set(plans["whole"].values()) == {0}
    assert list(plans["early"].values()) == pytest.approx([5] * len(plans["early"]))
    assert plans[SMALLER] == {(STEPS, STEPS, SIZE): pytest.approx(2)}
    unpruned = next(row for row in first if (row["after"], row["decoded"]) == (STEPS, "early"))
    assert unpruned["worse_than_unpruned"]["top"] == (0, 0, 0)
    assert not any(row["worse"]["top"][0] for row in rows if row["reward"] != REWARDS[0])


def test_the_cheapest_plan_is_the_first_that_every_reward_allows() -> None:
    scores = scores_with(early=swapped((0, 60)))
    # After two of six steps, plans lose the best 12; after three fitted steps, those that keep up to 48 lose two.
    scores[state("fp8", STEPS, 2)] = swapped(*((n, 36 + n) for n in range(12)))
    scores[state("fp8", FITTED, 3)] = swapped((0, 26), (1, 27))
    lines = page(judge("mini-sana", "fp8", scores))
    whole, early = (line for line in lines if line.startswith("| mini-sana | FP8 | ") and line.count("|") == 8)
    # Those that keep 40 or 48 lose as much as the one that keeps 32, for more steps.
    assert whole == (
        "| mini-sana | FP8 | whole | 4 fitted steps, after 3 keep 64 | 61% | +0.00 [+0.00, +0.00] "
        "| 4 fitted steps, after 3 keep 32 (56%): by 1.00, 1 of 4; "
        "4 fitted steps, after 3 keep 24 (54%): by 3.33, 1 of 4 |"
    )
    assert early == "| mini-sana | FP8 | early | none |  |  | after 2 keep 24 (50%): by 4.00, 1 of 4 |"


def test_rows_of_older_versions_are_decoded_whole() -> None:
    rows = judge("mini-sana", "fp8", scores_with())
    assert any("Decoded early" in line for line in page(rows))
    old = [row for row in rows if row["decoded"] == "whole"]
    expected = page(old)
    assert not any("decoded early" in line.lower() for line in expected)
    for row in old:
        del row["decoded"]
    assert page(old) == expected


def test_the_plot_shows_both_decoders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(plt, "close", figures.append)
    write_plot(judge("mini-sana", "fp8", scores_with(early=swapped((0, 60)))), tmp_path / "plot.png")
    monkeypatch.undo()
    (axes,) = figures[0].axes
    means = [line for line in axes.get_lines() if line.get_marker() == "o"]
    # Of each way to prune, the open dots of its dashed line lie above. Without pruning, six steps are the reference.
    heights = {
        way: [max(line.get_ydata(), default=0) for line in means if line.get_linestyle() == way] for way in ("-", "--")
    }
    assert heights == {"-": [0] * 5, "--": [*[pytest.approx(5 / 4)] * 6, 0]}
    texts = [text.get_text() for text in figures[0].legends[0].get_texts()]
    assert len(texts) == len(set(texts)) == 8
    plt.close(figures[0])
