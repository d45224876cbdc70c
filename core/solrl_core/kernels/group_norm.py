"""Group norm followed by SiLU, for images with channels last."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from solrl_core.kernels.elements import silu
from solrl_core.kernels.operation import operation, tl, triton

_WARPS = 8
_ELEMENTS = 4096
"""Elements that a program holds at a time."""
_PART = 1024
"""Pixels whose moments a program measures."""
_GROUPS = 4
"""Groups whose moments one program combines: with all groups, the few programs would be the slowest part."""


def rows(x: Tensor) -> Tensor:
    """Images [B, C, H, W] as [B, H, W, C], contiguous; a view if the channels are last in memory."""
    return x.permute(0, 2, 3, 1).contiguous()


def _out(x: Tensor, *_: Any) -> Tensor:
    count, channels, height, width = x.shape
    return x.new_empty(count, height, width, channels).permute(0, 3, 1, 2)


def plain_group_norm_silu(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return _out(x).copy_(F.silu(F.group_norm(x.float(), groups, weight.float(), bias.float(), eps)))


@operation("group_norm_silu", plain_group_norm_silu, outputs=_out)
def group_norm_silu(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """SiLU of the group norm of `x`.

    With channels last, a group's channels lie in short runs. The kernels read whole pixels, for all groups at once.

    Args:
        x: [B, C, H, W], channels last; on a GPU C is a power of two.
        groups: groups of channels; divides C.
        weight, bias: [C], of the norm.
        eps: epsilon of the norm.

    Returns:
        [B, C, H, W], channels last, in `x`'s dtype; computed in float32. Not differentiable.
    """
    out = _out(x)
    count, channels, height, width = x.shape
    pixels, x = height * width, rows(x)
    parts, block_pixels = triton.cdiv(pixels, _PART), max(1, _ELEMENTS // channels)
    # Of each group's values in a part of an image: mean, sum of squared deviations from it, and number.
    moments = torch.empty(count, parts, 3, groups, device=x.device)
    _moments[(parts, count)](
        x, moments, pixels, CHANNELS=channels, GROUPS=groups, PART=_PART, PIXELS=block_pixels, num_warps=_WARPS
    )
    affine = torch.empty(count, 2, channels, device=x.device)
    per_program = min(groups, _GROUPS)
    _affine[(count, groups // per_program)](
        moments,
        weight,
        bias,
        affine,
        parts,
        EPS=eps,
        CHANNELS=channels,
        GROUPS=groups,
        OWN=per_program,
        ROWS=min(triton.next_power_of_2(parts), _ELEMENTS // per_program),
        num_warps=_WARPS,
    )
    _normalize[(triton.cdiv(pixels, block_pixels), count)](
        x,
        affine,
        rows(out),
        pixels,
        CHANNELS=channels,
        PIXELS=block_pixels,
        EXACT=x.dtype == torch.float32,
        num_warps=_WARPS,
    )
    return out


@triton.jit
def _moments(
    x, moments, pixels, CHANNELS: tl.constexpr, GROUPS: tl.constexpr, PART: tl.constexpr, PIXELS: tl.constexpr
):
    """Moments of each group in one part of PART pixels."""
    EACH: tl.constexpr = CHANNELS // GROUPS
    part = tl.program_id(0)
    image = tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, CHANNELS)
    x += (image * pixels + part * PART) * CHANNELS + channel
    part_pixels = tl.minimum(pixels - part * PART, PART)
    # Values are taken relative to the first pixel, so that the squares do not cancel.
    origin = tl.load(x).to(tl.float32)
    sums = tl.zeros((PIXELS, CHANNELS), tl.float32)
    squares = tl.zeros((PIXELS, CHANNELS), tl.float32)
    for begin in range(0, PART, PIXELS):
        pixel = begin + tl.arange(0, PIXELS)
        inside = (pixel < part_pixels)[:, None]
        value = tl.load(x[None, :] + pixel[:, None] * CHANNELS, inside, 0).to(tl.float32)
        value = tl.where(inside, value - origin[None, :], 0)
        sums += value
        squares += value * value
    sums, squares = tl.sum(sums, 0), tl.sum(squares, 0)
    means = tl.reshape(origin + sums / part_pixels, (GROUPS, EACH))
    squares = tl.reshape(squares - sums * sums / part_pixels, (GROUPS, EACH))
    mean = tl.sum(means, 1) / EACH
    away = means - mean[:, None]
    to = moments + (image * tl.num_programs(0) + part) * 3 * GROUPS + tl.arange(0, GROUPS)
    tl.store(to, mean)
    tl.store(to + GROUPS, tl.sum(squares, 1) + tl.sum(away * away, 1) * part_pixels)
    tl.store(to + 2 * GROUPS, tl.zeros((GROUPS,), tl.float32) + part_pixels * EACH)


@triton.jit
def _affine(
    moments,
    weight,
    bias,
    affine,
    parts,
    EPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    GROUPS: tl.constexpr,
    OWN: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Combine the moments of OWN groups of an image; the norm of a channel is then factor · x + offset."""
    EACH: tl.constexpr = CHANNELS // GROUPS
    image = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * OWN + tl.arange(0, OWN)
    moments += image * parts * 3 * GROUPS + group
    sums = tl.zeros((OWN,), tl.float32)
    total = tl.zeros((OWN,), tl.float32)
    for begin in range(0, parts, ROWS):
        part = begin + tl.arange(0, ROWS)
        at = moments[None, :] + part[:, None] * 3 * GROUPS
        counts = tl.load(at + 2 * GROUPS, (part < parts)[:, None], 0)
        sums += tl.sum(tl.load(at, (part < parts)[:, None], 0) * counts, 0)
        total += tl.sum(counts, 0)
    mean = sums / total
    squares = tl.zeros((OWN,), tl.float32)
    for begin in range(0, parts, ROWS):
        part = begin + tl.arange(0, ROWS)
        at = moments[None, :] + part[:, None] * 3 * GROUPS
        counts = tl.load(at + 2 * GROUPS, (part < parts)[:, None], 0)
        away = tl.load(at, (part < parts)[:, None], 0) - mean[None, :]
        squares += tl.sum(tl.load(at + GROUPS, (part < parts)[:, None], 0) + counts * away * away, 0)
    inverse = tl.rsqrt(squares / total + EPS)
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
    value = silu(value, EXACT)
    tl.store(out + at, value.to(out.dtype.element_ty), inside)
