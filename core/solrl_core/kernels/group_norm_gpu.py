"""Triton kernels of group norm and SiLU and their launcher. Imported only on a GPU.

`solrl_core.kernels.group_norm` documents the operation and holds the reference implementation in torch.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
# ruff: noqa: N803, N806

import torch
import triton
import triton.language as tl
from torch import Tensor

from solrl_core.kernels.depthwise_gpu import silu

_WARPS = 8
_ELEMENTS = 4096
"""Elements that a program holds at a time."""
_TILE = 1024
"""Pixels of whose moments one program makes one row."""


def group_norm_silu(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, out: Tensor) -> None:
    """Launch `group_norm_silu` on `x` [B, H, W, C], writing to `out`; both are contiguous."""
    count, height, width, channels = x.shape
    pixels = height * width
    tiles = triton.cdiv(pixels, _TILE)
    moments = torch.empty(count, tiles, 2, groups, device=x.device)
    affine = torch.empty(count, 2, channels, device=x.device)
    each = max(1, _ELEMENTS // channels)
    sizes = {"CHANNELS": channels, "GROUPS": groups, "num_warps": _WARPS}
    _moments[(tiles, count)](x, moments, pixels, TILE=_TILE, PIXELS=each, **sizes)
    rows = min(triton.next_power_of_2(tiles), 256)
    _affine[(count,)](moments, weight, bias, affine, pixels, EPS=eps, TILES=tiles, TILE=_TILE, ROWS=rows, **sizes)
    _normalize[(triton.cdiv(pixels, each), count)](
        x, affine, out, pixels, CHANNELS=channels, PIXELS=each, EXACT=x.dtype == torch.float32, num_warps=_WARPS
    )


@triton.jit
def _moments(
    x, moments, pixels, CHANNELS: tl.constexpr, GROUPS: tl.constexpr, TILE: tl.constexpr, PIXELS: tl.constexpr
):
    """Mean and sum of squared deviations of each group over TILE pixels."""
    EACH: tl.constexpr = CHANNELS // GROUPS
    tile = tl.program_id(0)
    image = tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, CHANNELS)
    x += (image * pixels + tile * TILE) * CHANNELS + channel
    left = tl.minimum(pixels - tile * TILE, TILE)
    # Values are taken relative to the first pixel, so that the squares do not cancel.
    origin = tl.load(x).to(tl.float32)
    sums = tl.zeros((PIXELS, CHANNELS), tl.float32)
    squares = tl.zeros((PIXELS, CHANNELS), tl.float32)
    for begin in range(0, TILE, PIXELS):
        pixel = begin + tl.arange(0, PIXELS)
        inside = (pixel < left)[:, None]
        value = tl.load(x[None, :] + pixel[:, None] * CHANNELS, inside, 0).to(tl.float32)
        value = tl.where(inside, value - origin[None, :], 0)
        sums += value
        squares += value * value
    sums, squares = tl.sum(sums, 0), tl.sum(squares, 0)
    means = tl.reshape(origin + sums / left, (GROUPS, EACH))
    mean = tl.sum(means, 1) / EACH
    between = tl.sum((means - mean[:, None]) * (means - mean[:, None]), 1) * left
    within = tl.sum(tl.reshape(squares - sums * sums / left, (GROUPS, EACH)), 1)
    to = moments + (image * tl.num_programs(0) + tile) * 2 * GROUPS + tl.arange(0, GROUPS)
    tl.store(to, mean)
    tl.store(to + GROUPS, within + between)


@triton.jit
def _affine(
    moments,
    weight,
    bias,
    affine,
    pixels,
    EPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    GROUPS: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Combine the moments of an image; the norm of a channel is then factor · x + offset."""
    EACH: tl.constexpr = CHANNELS // GROUPS
    image = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    moments += image * TILES * 2 * GROUPS + group
    mean = tl.zeros((GROUPS,), tl.float32)
    for begin in range(0, TILES, ROWS):
        tile = begin + tl.arange(0, ROWS)
        share = tl.minimum(pixels - tile * TILE, TILE).to(tl.float32)[:, None] / pixels
        means = tl.load(moments[None, :] + tile[:, None] * 2 * GROUPS, (tile < TILES)[:, None], 0)
        mean += tl.sum(means * share, 0)
    squares = tl.zeros((GROUPS,), tl.float32)
    for begin in range(0, TILES, ROWS):
        tile = begin + tl.arange(0, ROWS)
        exists = (tile < TILES)[:, None]
        values = EACH * tl.minimum(pixels - tile * TILE, TILE).to(tl.float32)[:, None]
        means = tl.load(moments[None, :] + tile[:, None] * 2 * GROUPS, exists, 0)
        own = tl.load(moments[None, :] + GROUPS + tile[:, None] * 2 * GROUPS, exists, 0)
        away = means - mean[None, :]
        squares += tl.sum(tl.where(exists, own + values * away * away, 0), 0)
    inverse = tl.rsqrt(squares / (pixels.to(tl.float32) * EACH) + EPS)
    channel = group[:, None] * EACH + tl.arange(0, EACH)[None, :]
    factor = tl.load(weight + channel).to(tl.float32) * inverse[:, None]
    offset = tl.load(bias + channel).to(tl.float32) - mean[:, None] * factor
    tl.store(affine + image * 2 * CHANNELS + channel, factor)
    tl.store(affine + image * 2 * CHANNELS + CHANNELS + channel, offset)


@triton.jit
def _normalize(x, affine, out, pixels, CHANNELS: tl.constexpr, PIXELS: tl.constexpr, EXACT: tl.constexpr):
    image = tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, CHANNELS)
    affine += image * 2 * CHANNELS + channel
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    at = (image * pixels + pixel)[:, None] * CHANNELS + channel[None, :]
    inside = (pixel < pixels)[:, None]
    value = tl.load(x + at, inside, 0).to(tl.float32)
    value = value * tl.load(affine)[None, :] + tl.load(affine + CHANNELS)[None, :]
    tl.store(out + at, silu(value, EXACT).to(out.dtype.element_ty), inside)
