"""Triton kernel of the depthwise convolution and its launcher. Imported only on a GPU.

`solrl_core.kernels.depthwise_taps` documents the operation and holds the reference implementation in torch.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,assignment"
# ruff: noqa: N803, N806, RUF005

import triton
import triton.language as tl
from torch import Tensor

_CHANNELS = 128
_ROWS = 4
_REGISTERS = 112
"""Of a thread. One more, and one program fewer runs at once: three large images then need a second round."""


def depthwise(x: Tensor, taps: Tensor, out: Tensor, side: int) -> None:
    """Launch `depthwise`, writing to `out`; all tensors are contiguous."""
    count, height, width, channels = out.shape
    grid = (triton.cdiv(channels, _CHANNELS), triton.cdiv(height, _ROWS), count)
    sizes = {"SIDE": side, "ROWS": _ROWS, "BLOCK": _CHANNELS, "num_warps": 2, "maxnreg": _REGISTERS}
    _depthwise[grid](x, taps, out, height, width, channels, **sizes)


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
            done = _add(sums[i], inputs, weights, i, SIDE - 1, SIDE)
            complete = inside & (column >= REACH) & (row + i < height)
            tl.store(to + i * width * channels, done.to(out.dtype.element_ty), complete)
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
