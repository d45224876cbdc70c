"""Marks of tests that need a GPU, the measure of a difference, torch's attention, and what layers do on a GPU."""

import pytest
import torch
import torch.nn.functional as F
from solrl_core.precision.layers import QuantLinear, QuantPointwiseConv
from torch import Tensor, nn

GPU = pytest.mark.gpu
FP8 = pytest.mark.gpu("fp8")
HOPPER = pytest.mark.gpu("hopper")


@torch.no_grad()
def relative(found: Tensor, expected: Tensor) -> float:
    """Length of the difference in lengths of what was expected, wherever both are."""
    found, expected = found.cpu().double(), expected.cpu().double()
    return float(torch.linalg.norm(found - expected) / torch.linalg.norm(expected))


def torchs_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention of heads [B, S, H, D]."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)


@torch.no_grad()
def check_on_a_gpu(linear: type[QuantLinear], conv: type[QuantPointwiseConv], least: float, most: float) -> None:
    """Layers have an error between `least` and `most`, also after a refresh, which writes in place."""
    torch.manual_seed(0)
    for clean, quantise, shape in (
        (nn.Linear(256, 128), linear.from_linear, (4, 9, 256)),
        (nn.Conv2d(256, 128, 1), conv.from_conv, (4, 256, 3, 3)),
    ):
        clean = clean.to("cuda", torch.bfloat16)
        layer = quantise(clean)  # type: ignore[operator]
        x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        assert layer(x).shape == clean(x).shape
        places = [part.data_ptr() for part in layer.buffers()]
        for _ in range(2):
            assert least < relative(layer(x), clean(x)) < most
            layer.refresh_(clean.weight.float() * 2)
            clean.weight.mul_(2)
        assert [part.data_ptr() for part in layer.buffers()] == places
