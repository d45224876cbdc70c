"""Spread and noise of invented scores."""

import pytest
import torch
from rank_decline import measured, page


def test_noise_is_about_a_line_through_the_true_scores() -> None:
    draw = torch.Generator().manual_seed(0)
    true = torch.randn(3, 4000, generator=draw)
    found = measured(0.5 * true + 0.2 * torch.randn(3, 4000, generator=draw) + 7, true)
    assert found["spread"] == pytest.approx([1, 1, 1], abs=0.05)
    assert found["noise"] == pytest.approx([0.2, 0.2, 0.2], abs=0.01)
    assert measured(3 * true, true)["spearman"] == pytest.approx([1, 1, 1])


def test_the_page_gives_both_in_units_of_the_bases_spread() -> None:
    settings = {"model": "mini-sana", "iterations": 10, "prompts": 2, "candidates": 48}
    rows = [
        {"version": version, "way": "NVFP4", "spearman": [0.8, 0.8], "spread": [spread, spread], "noise": [1.0, 1.0]}
        for version, spread in ((0, 4.0), (10, 2.0))
    ]
    lines = page(settings, rows).splitlines()
    assert "| 0 | NVFP4 | 0.80 [0.80, 0.80] | 1.00 [1.00, 1.00] | 0.25 [0.25, 0.25] | 4.00 [4.00, 4.00] |" in lines
    assert "| 10 | NVFP4 | 0.80 [0.80, 0.80] | 0.50 [0.50, 0.50] | 0.25 [0.25, 0.25] | 2.00 [2.00, 2.00] |" in lines
