"""Shares of a change that survive rounding."""

from collections.abc import Callable

import pytest
import torch
from delta_survival import nvfp4, scaled, survival
from torch import Tensor


@pytest.mark.parametrize(
    ("on_grid", "least", "most", "error"), [(True, -0.02, 0.02, (0.9, 1.1)), (False, 0.8, 1.2, (2.0, 20.0))]
)
def test_a_small_change_is_lost_on_the_grid_and_kept_on_average_off_it(
    on_grid: bool, least: float, most: float, error: tuple[float, float]
) -> None:
    draw = torch.Generator().manual_seed(0)
    weight, change = torch.randn(256, 256, generator=draw), 0.005 * torch.randn(256, 256, generator=draw)
    found = survival([(nvfp4(weight) if on_grid else weight, change)], nvfp4)
    assert found["size"] == pytest.approx(0.005, rel=0.05)
    assert (found["off_grid"] < 1e-6) == on_grid
    assert least < found["share"] < most
    assert error[0] < found["error"] < error[1]


@pytest.mark.parametrize(
    ("rounding", "share", "error"),
    [(torch.clone, 1.0, 0.0), (torch.zeros_like, 0.0, 1.0), (lambda weight: 2 * weight, 2.0, 1.0)],
)
def test_share_and_error_of_known_roundings(rounding: Callable[[Tensor], Tensor], share: float, error: float) -> None:
    layers = [(torch.ones(2, 2), torch.full((2, 2), 0.5)), (torch.ones(3, 1), torch.full((3, 1), -0.25))]
    found = survival(layers, rounding)
    assert (found["share"], found["error"]) == (pytest.approx(share), pytest.approx(error))


def test_changes_are_scaled_together_to_a_size_relative_to_the_weights() -> None:
    layers = [(torch.ones(2, 2), torch.full((2, 2), 3.0)), (torch.ones(2, 2), torch.full((2, 2), 4.0))]
    (_, first), (_, second) = scaled(layers, 0.1)
    assert torch.allclose(first.square().mean() + second.square().mean(), torch.tensor(2 * 0.01))
    assert torch.allclose(4 * first, 3 * second)
