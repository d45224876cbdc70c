"""3×3 convolution as a matrix product, optionally of an image enlarged twice, and what follows it in a decoder.

Enlarging by nearest neighbours repeats each pixel, so the nine weights of a convolution after it meet only four
different pixels. Which weights add up depends on whether the output's row and column are even or odd: its *phase*. Four
convolutions of 2×2, one per phase, therefore give the same result in 4/9 of the arithmetic, without the large image.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from solrl_core.kernels.elements import silu
from solrl_core.kernels.group_norm import rows
from solrl_core.kernels.operation import TensorDescriptor, operation, tl, triton

CHANNELS_IN, CHANNELS_OUT = 64, 128
"""The kernel takes multiples of these numbers of channels."""
NORM_CHANNELS = (128, 256)
"""Numbers of channels that one program of the kernel computes, so that it can normalise a pixel."""
WIDTH = 64
"""Least width in pixels where the kernel is faster than cuDNN's."""
_STEP = 64
"""Channels of a pixel that a step of the product reads."""
_ROWS_OF_PHASE = (((0,), (1, 2)), ((0, 1), (2,)))
"""Phase → for each of the two pixels, the rows (or columns) of the 3×3 weights that meet it."""


def packed_weight(weight: Tensor, *, enlarge: bool) -> Tensor:
    """Weights of a convolution [O, C, 3, 3] as `convolve` takes them, summed in float32.

    Returns:
        [O, 9·C], or [4·O, 4·C] to `enlarge`, in `weight`'s dtype; pixels before channels.
    """
    if enlarge:
        wide = weight.float()
        phases = [
            torch.stack([_sum(_sum(wide, rows, 2), columns, 2) for rows in y for columns in x], -1)
            for y in _ROWS_OF_PHASE
            for x in _ROWS_OF_PHASE
        ]
        return torch.cat(phases).transpose(1, 2).flatten(1).to(weight.dtype).contiguous()
    return weight.flatten(2).transpose(1, 2).flatten(1).contiguous()


def _sum(x: Tensor, places: tuple[int, ...], axis: int) -> Tensor:
    return x.index_select(axis, torch.tensor(places, device=x.device)).sum(axis)


def _out(x: Tensor, weight: Tensor, bias: Tensor, enlarge: bool = False, silu: bool = False) -> Tensor:
    count, _, height, width = x.shape
    factor = 2 if enlarge else 1
    return bias.new_empty(count, factor * height, factor * width, len(bias)).permute(0, 3, 1, 2)


def plain_convolve(x: Tensor, weight: Tensor, bias: Tensor, enlarge: bool = False, silu: bool = False) -> Tensor:
    out = _out(x, weight, bias, enlarge=enlarge)
    if not enlarge:
        out.copy_(F.conv2d(x, weight.view(len(bias), 3, 3, -1).permute(0, 3, 1, 2), bias, padding=1))
    for phase, kernel in enumerate(weight.view(4, len(bias), 2, 2, -1).permute(0, 1, 4, 2, 3) if enlarge else ()):
        y, x_phase = divmod(phase, 2)
        out[..., y::2, x_phase::2] = F.conv2d(F.pad(x, (1 - x_phase, x_phase, 1 - y, y)), kernel, bias)
    return F.silu(out) if silu else out


@operation("convolve", plain_convolve, outputs=_out)
def convolve(x: Tensor, weight: Tensor, bias: Tensor, enlarge: bool, silu: bool) -> Tensor:
    """Convolve by 3×3 weights with a border of zeros; with `enlarge`, each pixel becomes 2×2 equal ones before.

    Args:
        x: [B, C, H, W], channels last; on a GPU in BF16 with C a multiple of `CHANNELS_IN`.
        weight: `packed_weight` of [O, C, 3, 3]; on a GPU O is a multiple of `CHANNELS_OUT`.
        bias: [O].
        enlarge: whether to enlarge.
        silu: whether the result passes through SiLU.

    Returns:
        [B, O, H, W], or [B, O, 2·H, 2·W], channels last; accumulated in float32. Not differentiable.
    """
    out = _out(x, weight, bias, enlarge)
    _launch(x, weight, bias, out, enlarge=enlarge, silu=silu)
    return out


def plain_convolve_norm(
    x: Tensor, weight: Tensor, bias: Tensor, norm_weight: Tensor, norm_bias: Tensor, eps: float, residual: Tensor
) -> Tensor:
    hidden = plain_convolve(x.float(), weight.float(), bias.float())
    normed = hidden * (hidden.square().mean(1, keepdim=True) + eps).rsqrt()
    wide = normed * norm_weight.float()[:, None, None] + norm_bias.float()[:, None, None] + residual.float()
    return _out(x, weight, bias).copy_(wide)


@operation("convolve_norm", plain_convolve_norm, outputs=lambda x, weight, bias, *_: _out(x, weight, bias))
def convolve_norm(
    x: Tensor, weight: Tensor, bias: Tensor, norm_weight: Tensor, norm_bias: Tensor, eps: float, residual: Tensor
) -> Tensor:
    """Convolve as `convolve` does, divide each pixel by the root mean square of its channels, scale, shift and add.

    Args:
        x, weight, bias: as for `convolve` without enlarging; on a GPU O is one of `NORM_CHANNELS`.
        norm_weight, norm_bias: [O].
        eps: epsilon of the norm.
        residual: [B, O, H, W], channels last.

    Returns:
        [B, O, H, W] in `bias`'s dtype, computed in float32.
    """
    out = _out(x, weight, bias)
    _launch(x, weight, bias, out, residual=residual, norm=(norm_weight, norm_bias, eps))
    return out


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    out: Tensor,
    *,
    enlarge: bool = False,
    silu: bool = False,
    residual: Tensor | None = None,
    norm: tuple[Tensor | None, Tensor | None, float] = (None, None, 0.0),
) -> None:
    """Compute `convolve`, or `convolve_norm` with its `residual` and the weight, bias and epsilon of its `norm`."""
    norm_weight, norm_bias, eps = norm
    count, channels, height, width = x.shape
    outs = len(bias)
    pixels = 128 if width >= 128 else 64  # of a row, that a program computes
    filters = 256 if outs % 256 == 0 else 128
    warps = 8 if pixels * filters > 128 * 128 else 4
    small = torch.cuda.get_device_capability(x.device)[0] == 12  # 99 KiB of shared memory, half of Hopper's
    tiles = triton.cdiv(width, pixels) * height * count

    def tiled(images: Tensor | None, block: int = filters) -> Any:
        return None if images is None else TensorDescriptor.from_tensor(rows(images), [1, 1, pixels, block])

    _convolve[(tiles * (outs // filters), 4 if enlarge else 1)](
        tiled(x, _STEP),
        TensorDescriptor.from_tensor(weight, [filters, _STEP]),
        bias,
        tiled(residual),
        rows(out) if enlarge else tiled(out),
        norm_weight,
        norm_bias,
        height,
        width,
        EPS=eps,
        IN=channels,
        OUT=outs,
        ENLARGE=enlarge,
        SILU=silu,
        PIXELS=pixels,
        FILTERS=filters,
        CHANNELS=_STEP,
        num_warps=warps,
        num_stages=4 if pixels == 64 and not small else 3,
    )


@triton.jit
def _convolve(
    x,
    weight,
    bias,
    residual,
    out,
    norm_weight,
    norm_bias,
    height,
    width,
    EPS: tl.constexpr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    ENLARGE: tl.constexpr,
    SILU: tl.constexpr,
    PIXELS: tl.constexpr,
    FILTERS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Compute FILTERS channels of PIXELS pixels in a row of one image; to enlarge, pixels of one phase.

    It is a product of the pixels under each weight with that weight. Descriptors give zeros outside of the image.
    """
    SIDE: tl.constexpr = 2 if ENLARGE else 3
    SPLIT: tl.constexpr = OUT // FILTERS
    DEPTH: tl.constexpr = IN // CHANNELS
    first = tl.program_id(0) % SPLIT * FILTERS
    tile = tl.program_id(0) // SPLIT
    across = tl.cdiv(width, PIXELS)
    column = tile % across * PIXELS
    row = tile // across % height
    image = tile // (across * height)
    phase = tl.program_id(1)
    # The pixel under the first weight: above and to the left, except in odd rows and columns of an enlarged image.
    first_row = row - 1 + phase // 2
    first_column = column - 1 + phase % 2

    sums = tl.zeros((PIXELS, FILTERS), tl.float32)
    for step in range(0, SIDE * SIDE * DEPTH):
        place = step // DEPTH
        pixels = x.load([image, first_row + place // SIDE, first_column + place % SIDE, step % DEPTH * CHANNELS])
        filters = weight.load([phase * OUT + first, step * CHANNELS])
        sums = tl.dot(tl.reshape(pixels, (PIXELS, CHANNELS)), tl.trans(filters), sums)
    channel = first + tl.arange(0, FILTERS)
    sums += tl.load(bias + channel).to(tl.float32)[None, :]
    if norm_weight is not None:
        sums *= tl.rsqrt(tl.sum(sums * sums, 1) / OUT + EPS)[:, None]
        sums = sums * tl.load(norm_weight + channel).to(tl.float32)[None, :]
        sums += tl.load(norm_bias + channel).to(tl.float32)[None, :]
    if residual is not None:
        sums += tl.reshape(residual.load([image, row, column, first]), (PIXELS, FILTERS)).to(tl.float32)
    if SILU:
        sums = silu(sums, False)
    if ENLARGE:
        pixel = column + tl.arange(0, PIXELS)
        line = (image * 2 * height + 2 * row + phase // 2).to(tl.int64) * 2 * width
        at = (line + 2 * pixel + phase % 2) * OUT
        tl.store(out + at[:, None] + channel[None, :], sums.to(out.dtype.element_ty), (pixel < width)[:, None])
    else:
        out.store([image, row, column, first], tl.reshape(sums.to(out.dtype), (1, 1, PIXELS, FILTERS)))
