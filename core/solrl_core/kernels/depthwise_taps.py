"""Depthwise convolution without activation, of images with channels last."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from solrl_core.kernels.operation import operation

SIDES = (3, 5)
"""Sides of the square of weights for which there is a kernel."""


def packed_taps(weight: Tensor) -> Tensor:
    """The weight [C, 1, side, side] of a depthwise convolution as `depthwise` takes it: [side², C]."""
    return weight.flatten(1).mT.contiguous()


def _out(x: Tensor, taps: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@operation("depthwise", outputs=_out)
def depthwise(x: Tensor, taps: Tensor) -> Tensor:
    """Convolve each channel by its own weights, with a border of zeros.

    The operation is bound by memory bandwidth, so the kernel reads each column of pixels once.

    Args:
        x: [B, H, W, C].
        taps: `packed_taps` of a weight [C, 1, side, side]; the side is odd, and on a GPU one of `SIDES`.

    Returns:
        [B, H, W, C], contiguous, in `x`'s dtype; accumulated in float32. Not differentiable.
    """
    side = _side(taps)
    if x.device.type != "cuda" or side not in SIDES:
        return plain_depthwise(x, taps)
    from solrl_core.kernels import depthwise_taps_gpu

    out = _out(x, taps)
    depthwise_taps_gpu.depthwise(x.contiguous(), taps.contiguous(), out, side)
    return out


def plain_depthwise(x: Tensor, taps: Tensor) -> Tensor:
    """`depthwise` in torch's operations."""
    side = _side(taps)
    weight = taps.mT.reshape(-1, 1, side, side)
    convolved = F.conv2d(x.movedim(-1, 1), weight, padding=side // 2, groups=x.shape[-1])
    return convolved.movedim(1, -1).clone(memory_format=torch.contiguous_format)


def _side(taps: Tensor) -> int:
    return math.isqrt(len(taps))
