"""Ideas for cheaper exploring, on scores for which the right answer is known."""

import json
from pathlib import Path
from typing import Any

import cheaper_exploring
import pytest
import torch
from cheaper_exploring import Explored, adaptive_groups, split, sure_candidates, uneven_halves, with_sure

RESULTS = Path(__file__).parents[2] / "docs" / "results"
SIZE = 96
SCORES = -torch.arange(1.0, SIZE + 1)
"""Scores of candidates whose index is their rank, counted from 0."""


def explored(halfway: torch.Tensor, prompts: int = 3) -> Explored:
    """Equal groups of two settings, whose scores are the true ones except halfway."""
    true = SCORES.expand(2, prompts, SIZE)
    return Explored(true, true, halfway.expand(2, prompts, SIZE), true)


def rows_by(rows: list[dict[str, Any]], *names: str) -> dict[tuple[Any, ...], dict[str, Any]]:
    return {tuple(row[name] for name in names): row for row in rows}


def test_sure_candidates_cost_nothing_if_halfway_ranks_alike() -> None:
    rows = rows_by(sure_candidates(explored(SCORES)), "keep", "sure", "selected")
    for row in rows.values():
        assert row["worse"]["both"] == row["change"]["both"] == (0, 0, 0)
        assert row["proposed"] == (row["saved"] >= 0.05)
    assert rows[40, 6, True]["saved"] == pytest.approx(1 - 316 / 336)
    assert rows[48, 8, True]["images"] == pytest.approx(128 / 144)
    assert rows[64, 8, False]["cost"] == pytest.approx(336 / 576)


def test_a_candidate_that_is_wrongly_sure_makes_the_best_worse() -> None:
    halfway = SCORES.clone()
    halfway[39] = 0.0
    rows = rows_by(sure_candidates(explored(halfway)), "keep", "sure", "selected")
    # The candidate of true rank 40 takes the place of that of rank 12.
    for row in (rows[48, 2, True], rows[48, 2, False]):
        assert row["change"]["top"] == pytest.approx([28 / 12] * 3)
        assert row["change"]["bottom"] == (0, 0, 0)
        assert row["most_worse"] == pytest.approx(28 / 12)
        assert (row["within"], row["settings"]) == (0, 2)
    assert rows[48, 0, True]["change"]["both"] == (0, 0, 0)
    # Pruned to 44, the plan of the same steps refines that candidate, too, and so finds its true rank.
    assert rows[48, 2, True]["than_pruning"]["top"] == pytest.approx([28 / 12] * 3)
    assert not rows[40, 6, True]["proposed"]


def test_sure_candidates_are_selected_outright_or_compared_by_their_score_halfway() -> None:
    halfway, final = torch.arange(10.0), 100 - torch.arange(10.0)
    outright = with_sure(halfway, final, keep=6, sure=1, selected=True)
    assert outright.nan_to_num(-1).tolist() == [92 - 1, 99, 98, -1, -1, -1, -1, 93, 92, 100]
    compared = with_sure(halfway, final, keep=6, sure=1, selected=False)
    assert compared.nan_to_num(-1).tolist() == [0, 99, 98, -1, -1, -1, -1, 93, 92, 9]


def test_uneven_halves_help_where_the_best_are_found_late() -> None:
    halfway = SCORES.clone()
    # Twenty others rank before the best 12 halfway; the worst are found.
    halfway[:12] = SCORES[31] - 0.5
    rows = rows_by(uneven_halves(explored(halfway)), "keep", "best")
    assert rows[48, 32]["worse"]["both"] == (0, 0, 0)
    assert rows[48, 24]["worse"]["top"][0] > 5
    assert rows[48, 32]["larger_change"] == pytest.approx([-rows[48, 24]["most_worse"]] * 3)
    assert rows[48, 32]["overall_change"] == rows[48, 32]["larger_change"]
    assert rows[48, 16]["larger_change"][1] > 0
    assert rows[48, 16]["within"] == 0
    assert split(SCORES, SCORES, best=2, worst=1).isfinite().nonzero().flatten().tolist() == [0, 1, 95]


@pytest.mark.parametrize(("spreads", "pays"), [((1.0, 1.0), False), ((0.2, 2.0), True)])
def test_adaptive_groups_pay_only_where_spreads_differ(
    spreads: tuple[float, float], pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cheaper_exploring, "ORDERS", 4)
    draw = torch.randn(1, 40, SIZE, generator=torch.Generator().manual_seed(0))
    true = draw * torch.tensor(spreads).repeat(20)[:, None]
    rows = rows_by(adaptive_groups(Explored(true, true, true, true)), "rule", "first")
    wide = rows["widest spread of scores", 48]
    assert wide["mean"] == 72
    assert wide["base"][1 if pays else 2] * (1 if pays else -1) > 0
    # In a group's own deviations, more candidates gain less and less.
    assert wide["group"][0] < 0
    assert rows["all alike", 72]["base"] == (0, 0, 0)
    assert rows["known: largest gain", 48]["base"][0] >= max(rows[key]["base"][0] for key in rows if key[1] == 48)


def test_the_stored_figures_are_those_of_the_page() -> None:
    from cheaper_exploring_table import table

    stored: dict[str, Any] = json.loads((RESULTS / "cheaper_exploring.json").read_text())
    assert (RESULTS / "cheaper_exploring.md").read_text() == table(stored)
