"""Linear layers of few rows on a CPU: a row does not depend on the number of rows."""

import pytest
import torch
from solrl_core.precision import QuantLinear
from solrl_core.sampling.min_rows import FEWEST_ROWS, pad_to_min_rows
from torch import nn


@pytest.mark.parametrize("quantised", [False, True], ids=["linear", "nvfp4"])
@torch.inference_mode()
def test_a_row_has_the_same_bits_among_any_number_of_rows(quantised: bool) -> None:
    torch.manual_seed(0)
    layer: nn.Module = nn.Linear(256, 192)
    model = nn.Sequential(QuantLinear.from_linear(layer) if quantised else layer)
    x = torch.randn(FEWEST_ROWS, 256)
    plain = model(x)
    pad_to_min_rows(model)
    assert torch.equal(model(x), plain)
    for count in range(FEWEST_ROWS):
        assert torch.equal(model(x[:count]), plain[:count])


def test_rows_of_tokens_are_not_padded() -> None:
    met: list[torch.Size] = []
    layer = nn.Linear(4, 4)
    layer.register_forward_hook(lambda module, inputs, output: met.append(output.shape))
    model = nn.Sequential(layer)
    pad_to_min_rows(model)
    assert model(torch.randn(2, 3, 4)).shape == (2, 3, 4)
    assert model(torch.randn(2, 4)).shape == (2, 4)
    assert met == [(2, 3, 4), (2, 4)]
