"""Emulated FP8: values rounded to E4M3 with one scale per row, multiplied in float32.

For the fidelity of FP8 on devices without FP8 units. A GPU differs in the order and width of its sums, and computes the
scale of an activation function's output in a kernel of its own.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from solrl_core.kernels.rows import quantize_rows
from solrl_core.precision.layers import QuantLayer, QuantLinear, QuantPointwiseConv


class _EmulatedFp8(QuantLayer):
    """Mixin that replaces the emulated NVFP4 of a quantised layer with emulated FP8; `weight` is float32."""

    def _hold(self, weight: Tensor, bias: Tensor | None) -> None:
        self.register_buffer("weight", _rounded(weight))
        bias_copy = None if bias is None else bias.detach().to(torch.bfloat16).float()
        self.register_buffer("bias", bias_copy)

    def _write(self, weight: Tensor) -> None:
        self.weight.copy_(_rounded(weight.to(self.weight.device)).view_as(self.weight))

    def _linear(self, x: Tensor) -> Tensor:
        """`x` [..., in] → [..., out], rounded to BF16 as on a GPU."""
        rounded = _rounded(x.reshape(-1, x.shape[-1])).view(x.shape)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(rounded, self.weight.flatten(1), self.bias).to(torch.bfloat16)


class EmulatedFp8Linear(_EmulatedFp8, QuantLinear):
    """``nn.Linear`` in emulated FP8."""


class EmulatedFp8PointwiseConv(_EmulatedFp8, QuantPointwiseConv):
    """1×1 ``nn.Conv2d`` in emulated FP8."""


def _rounded(rows: Tensor) -> Tensor:
    """Rows [M, ...] rounded to E4M3, each with its own scale; float32 of the same shape."""
    codes, scales = quantize_rows(rows.detach().flatten(1).float(), "")
    return (codes.float() * scales).view(rows.shape)
