"""Emulated NVFP4 with the better of two scales for each block."""

import torch
from solrl_core.precision.nvfp4 import quantize_dequantize_per_candidate
from support.four_over_six import rounded


def test_a_block_becomes_what_changes_it_less() -> None:
    # The largest code of E2M1 is 6: of a block of 4s and 3s, 6 keeps the 4s alone.
    blocks = torch.tensor([[6.0] + [0.0] * 15, [4.0, 3.0] * 8, [6.0, 4.0] * 8]).flatten()[None]
    assert torch.allclose(rounded(blocks), blocks, rtol=1e-6)
    assert not rounded(torch.zeros(2, 3, 32)).any()
    x = torch.randn(4, 8, 256, generator=torch.Generator().manual_seed(0))
    off, usual = ((values - x).abs().mean() for values in (rounded(x), quantize_dequantize_per_candidate(x)))
    assert 0.9 < off / usual < 0.97
