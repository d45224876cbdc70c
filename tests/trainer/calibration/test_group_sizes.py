"""Predictions for other group sizes, from subsets of measured groups."""

import pytest
import torch
from solrl_core.fidelity import separations
from solrl_proto.selection import best_worst
from solrl_trainer.calibration.group_sizes import group_sizes, group_sizes_text

PROMPTS, N = 6, 96
TRUE, NOISE, EARLY = torch.randn(3, PROMPTS, N, generator=torch.Generator().manual_seed(0))
FINAL = TRUE + 0.4 * NOISE
HALFWAY = TRUE + 0.8 * EARLY


def by_size(**changes: object) -> dict[tuple[int, int], tuple[float, float]]:
    """(candidates, keep) → separation, contrast."""
    settings = {"halfway": None, "kept": N} | changes
    found = group_sizes(FINAL, true=TRUE, **settings)  # type: ignore[arg-type]
    return {(one.candidates, one.keep): (one.separation.value, one.contrast.value) for one in found}


def test_the_measured_size_gives_what_was_measured() -> None:
    found = by_size()
    assert sorted({size for size, _ in found}) == [24, 48, 72, 96]
    assert {keep for _, keep in found} == {8, 16, 24}
    for keep in (8, 16, 24):
        assert found[96, keep][0] == pytest.approx(float(separations(FINAL, TRUE, keep).mean()))


def test_the_measured_size_gives_what_was_measured_with_pruning() -> None:
    scores = torch.full_like(FINAL, torch.nan)
    for prompt in range(PROMPTS):
        places = best_worst(HALFWAY[prompt], 32)
        scores[prompt, places] = FINAL[prompt, places]
    found = by_size(halfway=HALFWAY, kept=32)
    assert found[96, 24][0] == pytest.approx(float(separations(scores, TRUE, 24).mean()))
    # A third of 24 is 8 candidates: more cannot be selected.
    assert {keep for size, keep in found if size == 24} == {8}


def test_subsets_predict_groups_that_were_really_smaller() -> None:
    # Independent groups of 24 with the same noise.
    true, noise = torch.randn(2, 2000, 24, generator=torch.Generator().manual_seed(1))
    really = float(separations(true + 0.4 * noise, true, 8).mean())
    assert by_size()[24, 8][0] == pytest.approx(really, abs=0.02)


def test_a_larger_group_raises_the_contrast() -> None:
    found = by_size()
    for keep in (8, 16, 24):
        contrasts = [found[size, keep][1] for size in (24, 48, 72, 96)]
        assert contrasts == sorted(contrasts)
        assert contrasts[0] + 0.3 < contrasts[-1]
    # Fewer from either end are more extreme.
    assert found[96, 8][1] > found[96, 16][1] > found[96, 24][1]


def test_the_contrast_is_the_difference_of_the_true_scores() -> None:
    expected = []
    for final, true in zip(FINAL, TRUE, strict=True):
        chosen = true[best_worst(final, 16)]
        expected.append(float((chosen[:8].mean() - chosen[8:].mean()) / true.std(correction=0)))
    assert by_size()[96, 16][1] == pytest.approx(sum(expected) / PROMPTS)


def test_equal_scores_have_no_contrast() -> None:
    flat = torch.zeros(2, 24)
    (one,) = group_sizes(flat, None, flat, kept=24, ends=[4])
    assert one.contrast == (0, 0, 0)


def test_the_table_has_a_line_for_each_size() -> None:
    rows = [
        {"candidates": 24, "keep": 8, "separation": 0.5, "contrast": 1.25},
        {"candidates": 96, "keep": 8, "separation": 0.75, "contrast": 2.5},
        {"candidates": 96, "keep": 24, "separation": 0.7, "contrast": 2.0},
    ]
    head, small, large = group_sizes_text(rows)
    assert head.split() == ["candidates", "keep", "8", "keep", "24"]
    assert small.split() == ["24", "0.50", "/", "1.25", "–"]
    assert large.split() == ["96", "0.75", "/", "2.50", "0.70", "/", "2.00"]
