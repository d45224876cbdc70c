"""Gated depthwise convolution: SiLU, 3×3 depthwise convolution and GLU, the middle of SANA's feed-forward."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import wrap_triton

from solrl_core.kernels.elements import silu
from solrl_core.kernels.operation import operation, tl, triton

_CHANNELS = 128
_ROWS = 4


def plain_silu_depthwise_glu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    inner = F.silu(x.float()).movedim(-1, 1)
    convolved = F.conv2d(inner, weight.float(), bias.float(), padding=1, groups=x.shape[-1]).movedim(1, -1)
    value, gate = convolved.chunk(2, -1)
    return (value * F.silu(gate)).to(x.dtype).contiguous()


@operation("silu_depthwise_glu", plain_silu_depthwise_glu)
def silu_depthwise_glu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Convolve SiLU(x) depthwise, split the channels into (value, gate) and return value · SiLU(gate).

    The operation is bound by memory bandwidth, so the kernel stores no intermediate.

    Args:
        x: [B, H, W, 2·C], contiguous: the output of the first pointwise convolution, channels last.
        weight: [2·C, 1, 3, 3], of the depthwise convolution.
        bias: [2·C], of the depthwise convolution.

    Returns:
        [B, H, W, C] in `x`'s dtype, accumulated in float32. For inputs of 16 bits, the kernel's SiLU has the error of
        a hardware's tanh, 2**-11.
    """
    out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    count, height, width, channels = out.shape
    grid = (triton.cdiv(channels, _CHANNELS), triton.cdiv(height, _ROWS), count)
    wrap_triton(_silu_depthwise_glu)[grid](
        x.contiguous(),
        weight.flatten(1).mT.contiguous(),
        bias,
        out,
        height,
        width,
        channels,
        BLOCK=_CHANNELS,
        ROWS=_ROWS,
        EXACT=x.dtype == torch.float32,
        num_warps=2,
    )
    return out


@triton.jit
def _silu_depthwise_glu(
    x,
    taps,
    bias,
    out,
    height,
    width,
    channels,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Compute BLOCK channels of ROWS output rows, sweeping the columns from left to right.

    Each input column contributes to three output columns (left, middle, right), so it is read only once. `_left` and
    `_mid` hold the partial sums of the output columns to the left of and at the current column, one for each row.
    """
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1) * ROWS
    inside = c < channels
    image = tl.program_id(2).to(tl.int64) * height * width

    value_bias = tl.load(bias + c, inside, 0).to(tl.float32)
    gate_bias = tl.load(bias + channels + c, inside, 0).to(tl.float32)
    value_taps = _taps(taps + c, 2 * channels, inside)
    gate_taps = _taps(taps + channels + c, 2 * channels, inside)
    value_left, value_mid = _repeated(value_bias, ROWS), _repeated(value_bias, ROWS)
    gate_left, gate_mid = _repeated(gate_bias, ROWS), _repeated(gate_bias, ROWS)

    for column in range(width + 1):
        here = inside & (column < width)
        at = x + (image + (row - 1) * width + column) * (2 * channels) + c
        values = _inputs(at, 2 * channels * width, here, row, height, ROWS, EXACT)
        gates = _inputs(at + channels, 2 * channels * width, here, row, height, ROWS, EXACT)
        to = out + (image + row * width + column - 1) * channels + c
        value_done = _add(value_left, values, value_taps[2], value_taps[5], value_taps[8], ROWS)
        gate_done = _add(gate_left, gates, gate_taps[2], gate_taps[5], gate_taps[8], ROWS)
        for i in tl.static_range(ROWS):
            gated = value_done[i] * silu(gate_done[i], EXACT)
            valid = inside & (column > 0) & (row + i < height)
            tl.store(to + i * width * channels, gated.to(out.dtype.element_ty), valid)
        value_left = _add(value_mid, values, value_taps[1], value_taps[4], value_taps[7], ROWS)
        gate_left = _add(gate_mid, gates, gate_taps[1], gate_taps[4], gate_taps[7], ROWS)
        biases = _repeated(value_bias, ROWS)
        value_mid = _add(biases, values, value_taps[0], value_taps[3], value_taps[6], ROWS)
        biases = _repeated(gate_bias, ROWS)
        gate_mid = _add(biases, gates, gate_taps[0], gate_taps[3], gate_taps[6], ROWS)


@triton.jit
def _repeated(x, COUNT: tl.constexpr):
    out = ()
    for _ in tl.static_range(COUNT):
        out = out + (x,)
    return out


@triton.jit
def _taps(at, stride, inside):
    out = ()
    for i in tl.static_range(9):
        out = out + (tl.load(at + i * stride, inside, 0).to(tl.float32),)
    return out


@triton.jit
def _inputs(at, stride, here, row, height, ROWS: tl.constexpr, EXACT: tl.constexpr):
    """SiLU of one column of the inputs: the ROWS output rows, and the rows above and below."""
    out = ()
    for i in tl.static_range(ROWS + 2):
        exists = here & (row + i > 0) & (row + i <= height)
        out = out + (silu(tl.load(at + i * stride, exists, 0).to(tl.float32), EXACT),)
    return out


@triton.jit
def _add(sums, column, above, middle, below, ROWS: tl.constexpr):
    """Add one column of inputs, weighted by one column of the taps, to the sums of each row."""
    out = ()
    for i in tl.static_range(ROWS):
        out = out + (sums[i] + above * column[i] + middle * column[i + 1] + below * column[i + 2],)
    return out
