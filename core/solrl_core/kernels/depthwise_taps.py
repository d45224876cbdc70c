"""Depthwise convolution without activation, of images with channels last."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from solrl_core.kernels.operation import like_first, operation, tl, triton

SIDES = (3, 5)
"""Sides of the square of weights that the kernel supports."""
_CHANNELS = 128
_ROWS = 4
_REGISTERS = 112
"""Registers of a thread. One more, and one program fewer runs at once: three large images then need a second round."""


def packed_taps(weight: Tensor) -> Tensor:
    """The weight [C, 1, side, side] of a depthwise convolution as `depthwise` takes it: [side², C]."""
    return weight.flatten(1).mT.contiguous()


def plain_depthwise(x: Tensor, taps: Tensor) -> Tensor:
    side = _side(taps)
    weight = taps.mT.reshape(-1, 1, side, side)
    convolved = F.conv2d(x.movedim(-1, 1), weight, padding=side // 2, groups=x.shape[-1])
    return convolved.movedim(1, -1).clone(memory_format=torch.contiguous_format)


def _side(taps: Tensor) -> int:
    return math.isqrt(len(taps))


@operation("depthwise", plain_depthwise, outputs=like_first)
def depthwise(x: Tensor, taps: Tensor) -> Tensor:
    """Convolve each channel by its own weights, with a border of zeros.

    The operation is bound by memory bandwidth, so the kernel reads each column of pixels once.

    Args:
        x: [B, H, W, C].
        taps: `packed_taps` of a weight [C, 1, side, side]; the side is odd, and on a GPU one of `SIDES`.

    Returns:
        [B, H, W, C], contiguous, in `x`'s dtype; accumulated in float32. Not differentiable.
    """
    out = like_first(x)
    count, height, width, channels = out.shape
    grid = (triton.cdiv(channels, _CHANNELS), triton.cdiv(height, _ROWS), count)
    sizes = {"SIDE": _side(taps), "ROWS": _ROWS, "BLOCK": _CHANNELS, "num_warps": 2, "maxnreg": _REGISTERS}
    _depthwise[grid](x.contiguous(), taps.contiguous(), out, height, width, channels, **sizes)
    return out


@triton.jit
def _depthwise(x, taps, out, height, width, channels, SIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Compute BLOCK channels of ROWS output rows, sweeping the columns from left to right.

    Each input column contributes to SIDE output columns, so it is read only once. `sums` holds the partial sums of the
    SIDE - 1 leftmost of these, column by column; the rightmost starts from nothing.
    """
    REACH: tl.constexpr = SIDE // 2
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1) * ROWS
    inside = c < channels
    image = tl.program_id(2).to(tl.int64) * height * width

    weights = ()
    for i in tl.static_range(SIDE * SIDE):
        weights = weights + (tl.load(taps + i * channels + c, inside, 0).to(tl.float32),)
    sums = ()
    for _ in tl.static_range((SIDE - 1) * ROWS):
        sums = sums + (tl.zeros((BLOCK,), tl.float32),)

    for column in range(width + REACH):
        here = inside & (column < width)
        at = x + (image + (row - REACH) * width + column) * channels + c
        inputs = ()
        for i in tl.static_range(ROWS + SIDE - 1):
            exists = here & (row + i >= REACH) & (row + i < height + REACH)
            inputs = inputs + (tl.load(at + i * width * channels, exists, 0).to(tl.float32),)
        to = out + (image + row * width + column - REACH) * channels + c
        for i in tl.static_range(ROWS):
            total = _add(sums[i], inputs, weights, i, SIDE - 1, SIDE)
            complete = inside & (column >= REACH) & (row + i < height)
            tl.store(to + i * width * channels, total.to(out.dtype.element_ty), complete)
        later = ()
        for i in tl.static_range((SIDE - 2) * ROWS):
            later = later + (_add(sums[i + ROWS], inputs, weights, i % ROWS, SIDE - 2 - i // ROWS, SIDE),)
        for i in tl.static_range(ROWS):
            later = later + (_add(tl.zeros((BLOCK,), tl.float32), inputs, weights, i, 0, SIDE),)
        sums = later


@triton.jit
def _add(sum, inputs, weights, ROW: tl.constexpr, COLUMN: tl.constexpr, SIDE: tl.constexpr):
    """Add the inputs from ROW down, weighted by one column of the weights."""
    for i in tl.static_range(SIDE):
        sum += weights[i * SIDE + COLUMN] * inputs[ROW + i]
    return sum
