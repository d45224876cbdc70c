"""Contrast of selection: proxies of a wanted fidelity, and rows that can be compared with the Gaussian model."""

import pytest
import torch
from contrast import EXACT, SPEARMANS, degraded, rows
from solrl_core.fidelity import rank_fidelity


@pytest.mark.parametrize("spearman", SPEARMANS)
def test_a_degraded_proxy_has_the_wanted_rank_correlation(spearman: float) -> None:
    true = torch.rand(40, 96, generator=torch.Generator().manual_seed(1)) ** 3  # far from normal
    assert rank_fidelity(degraded(true, spearman), true).spearman == pytest.approx(spearman, abs=0.02)


def test_normal_scores_have_the_contrast_of_the_model() -> None:
    true, noise = torch.randn(2, 60, 96, generator=torch.Generator().manual_seed(2))
    found = rows(true, true + 0.5 * noise, "a plan")
    assert {row["proxy"] for row in found} == {"a plan", EXACT, *(f"degraded to {one:g}" for one in SPEARMANS)}
    assert {(row["candidates"], row["keep"]) for row in found} == {(24, 8), (24, 24), (96, 8), (96, 24)}
    for row in found:
        assert row["contrast"][0] == pytest.approx(row["predicted"], abs=0.1)
    exact = next(row for row in found if row["proxy"] == EXACT)
    assert exact["spearman"] == pytest.approx(1)
