"""3×3 convolution as a matrix product, optionally of an image enlarged twice, and what follows it in a decoder.

Enlarging by nearest neighbours repeats each pixel, so the nine weights of a convolution after it meet only four
different pixels. Which weights add up depends on whether the output's row and column are even or odd: its *phase*. Four
convolutions of 2×2, one per phase, therefore give the same result in 4/9 of the arithmetic, without the large image.

In FP8, images and weights are E4M3 codes. All images share one scale, which is known before. Weights have one scale per
row. Hopper's tensor cores add up products of codes in fewer bits than float32.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from solrl_core.kernels.elements import e4m3_range, silu
from solrl_core.kernels.group_norm import rows
from solrl_core.kernels.operation import TensorDescriptor, operation, tl, triton
from solrl_core.kernels.rows import scaled_codes, scaled_rows

CHANNELS_IN, CHANNELS_IN_FP8, CHANNELS_OUT = 64, 128, 128
"""The kernel takes multiples of these numbers of channels."""
NORM_CHANNELS = (128, 256)
"""Numbers of channels that one program of the kernel computes, so that it can normalise a pixel."""
WIDTH = 64
"""Least width in pixels where the kernel is faster than cuDNN's."""
_BYTES = 128
"""Bytes of a pixel's channels that a step of the product reads."""
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


def packed_codes(weight: Tensor, *, enlarge: bool) -> tuple[Tensor, Tensor]:
    """`packed_weight` in FP8: E4M3 codes, and the float32 scale of each row; codes × scales are the weights."""
    rows = packed_weight(weight.float(), enlarge=enlarge)
    codes, scales = scaled_rows(rows, rows.abs().amax(1, keepdim=True))
    return codes, scales.flatten()


def _sum(x: Tensor, places: tuple[int, ...], axis: int) -> Tensor:
    return x.index_select(axis, torch.tensor(places, device=x.device)).sum(axis)


def _out(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    scales: Tensor | None = None,
    enlarge: bool = False,
    silu: bool = False,
    out_scale: Tensor | None = None,
) -> Tensor:
    count, _, height, width = x.shape
    factor = 2 if enlarge else 1
    shape = (count, factor * height, factor * width, len(bias))
    dtype = bias.dtype if out_scale is None else torch.float8_e4m3fn
    return bias.new_empty(shape, dtype=dtype).permute(0, 3, 1, 2)


def plain_convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    scales: Tensor | None = None,
    enlarge: bool = False,
    silu: bool = False,
    out_scale: Tensor | None = None,
) -> Tensor:
    """`convolve` in torch's operations; of codes in float32."""
    out = _out(x, weight, bias, enlarge=enlarge)
    if scales is not None:
        x, weight = x.float(), weight.float()  # codes are exact in TF32, too

    def sums(image: Tensor, kernel: Tensor, padding: int, scale: Tensor | None) -> Tensor:
        if scale is None:
            return F.conv2d(image, kernel, bias, padding=padding)
        return F.conv2d(image, kernel, padding=padding) * scale[:, None, None] + bias.float()[:, None, None]

    if not enlarge:
        out.copy_(sums(x, weight.view(len(bias), 3, 3, -1).permute(0, 3, 1, 2), 1, scales))
    for phase, kernel in enumerate(weight.view(4, len(bias), 2, 2, -1).permute(0, 1, 4, 2, 3) if enlarge else ()):
        y, x_phase = divmod(phase, 2)
        padded = F.pad(x, (1 - x_phase, x_phase, 1 - y, y))
        scale = None if scales is None else scales.view(4, -1)[phase]
        out[..., y::2, x_phase::2] = sums(padded, kernel, 0, scale)
    out = F.silu(out) if silu else out
    return out if out_scale is None else scaled_codes(out, out_scale)


@operation("convolve", plain_convolve, outputs=_out)
def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    scales: Tensor | None,
    enlarge: bool,
    silu: bool,
    out_scale: Tensor | None,
) -> Tensor:
    """Convolve by 3×3 weights with a border of zeros; with `enlarge`, each pixel becomes 2×2 equal ones before.

    Args:
        x: [B, C, H, W], channels last; on a GPU in BF16 with C a multiple of `CHANNELS_IN`, or E4M3 codes with C a
            multiple of `CHANNELS_IN_FP8`.
        weight: `packed_weight` of [O, C, 3, 3], or codes of it, in `x`'s dtype; on a GPU O is a multiple of
            `CHANNELS_OUT`.
        bias: [O], in the dtype of the result.
        scales: float32, for each row of `weight` the factor of products of codes; None without codes.
        enlarge: whether to enlarge.
        silu: whether the result passes through SiLU.
        out_scale: None, or the scale, a float32 scalar, of E4M3 codes to return.

    Returns:
        [B, O, H, W], or [B, O, 2·H, 2·W], channels last; from BF16 accumulated in float32. Not differentiable.
    """
    out = _out(x, weight, bias, out_scale=out_scale, enlarge=enlarge)
    _launch(x, weight, bias, scales, out, enlarge=enlarge, silu=silu, out_scale=out_scale)
    return out


def _with_norm(x: Tensor, weight: Tensor, bias: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    *_, out_scale = others
    images = _out(x, weight, bias)
    codes = torch.empty_like(images, dtype=torch.float8_e4m3fn)
    return images, codes if out_scale is not None else codes[:0]


def plain_convolve_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    scales: Tensor | None,
    norm_weight: Tensor,
    norm_bias: Tensor,
    eps: float,
    residual: Tensor,
    out_scale: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`convolve_norm` in torch's operations."""
    hidden = plain_convolve(x.float(), weight.float(), bias.float(), scales)
    normed = hidden * (hidden.square().mean(1, keepdim=True) + eps).rsqrt()
    wide = normed * norm_weight.float()[:, None, None] + norm_bias.float()[:, None, None] + residual.float()
    images = _out(x, weight, bias).copy_(wide)
    codes = torch.empty_like(images, dtype=torch.float8_e4m3fn)
    return images, codes[:0] if out_scale is None else codes.copy_(scaled_codes(wide, out_scale))


@operation("convolve_norm", plain_convolve_norm, outputs=_with_norm)
def convolve_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    scales: Tensor | None,
    norm_weight: Tensor,
    norm_bias: Tensor,
    eps: float,
    residual: Tensor,
    out_scale: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Convolve as `convolve` does, divide each pixel by the root mean square of its channels, scale, shift and add.

    Args:
        x, weight, bias, scales: as for `convolve` without enlarging; on a GPU O is one of `NORM_CHANNELS`.
        norm_weight, norm_bias: [O].
        eps: epsilon of the norm.
        residual: [B, O, H, W], channels last.
        out_scale: None, or the scale, a float32 scalar, of E4M3 codes to return.

    Returns:
        [B, O, H, W] in `bias`'s dtype, computed in float32, and codes of it, none without `out_scale`.
    """
    out, codes = _with_norm(x, weight, bias, out_scale)
    own_codes = None if out_scale is None else codes
    norm = (norm_weight, norm_bias, eps)
    _launch(x, weight, bias, scales, out, residual=residual, norm=norm, codes=own_codes, out_scale=out_scale)
    return out, codes


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    scales: Tensor | None,
    out: Tensor,
    *,
    enlarge: bool = False,
    silu: bool = False,
    out_scale: Tensor | None = None,
    residual: Tensor | None = None,
    norm: tuple[Tensor | None, Tensor | None, float] = (None, None, 0.0),
    codes: Tensor | None = None,
) -> None:
    """Compute `convolve` or `convolve_norm` into `out` and `codes`; an enlarged image has only `silu` and `out_scale`.

    `norm` has its weight, bias and epsilon.
    """
    norm_weight, norm_bias, eps = norm
    count, channels, height, width = x.shape
    outs = len(bias)
    pixels = 128 if width >= 128 else 64  # of a row, that a program computes
    filters = 256 if outs % 256 == 0 else 128
    warps = 8 if pixels * filters > 128 * 128 else 4
    small = torch.cuda.get_device_capability(x.device)[0] == 12  # 99 KiB of shared memory, half of Hopper's
    tiles = triton.cdiv(width, pixels) * height * count
    step = _BYTES // x.element_size()

    def tiled(images: Tensor | None, block: int = filters) -> Any:
        return None if images is None else TensorDescriptor.from_tensor(rows(images), [1, 1, pixels, block])

    _convolve[(tiles * (outs // filters), 4 if enlarge else 1)](
        tiled(x, step),
        TensorDescriptor.from_tensor(weight, [filters, step]),
        bias,
        scales,
        tiled(residual),
        rows(out) if enlarge else tiled(out),
        norm_weight,
        norm_bias,
        tiled(codes),
        out_scale,
        height,
        width,
        EPS=eps,
        IN=channels,
        OUT=outs,
        ENLARGE=enlarge,
        SILU=silu,
        PIXELS=pixels,
        FILTERS=filters,
        CHANNELS=step,
        num_warps=warps,
        num_stages=4 if pixels == 64 and not small else 3,
    )


@triton.jit
def _convolve(
    x,
    weight,
    bias,
    scales,
    residual,
    out,
    norm_weight,
    norm_bias,
    codes,
    out_scale,
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
    top = row - 1 + phase // 2
    left = column - 1 + phase % 2

    sums = tl.zeros((PIXELS, FILTERS), tl.float32)
    for step in range(0, SIDE * SIDE * DEPTH):
        place = step // DEPTH
        pixels = x.load([image, top + place // SIDE, left + place % SIDE, step % DEPTH * CHANNELS])
        filters = weight.load([phase * OUT + first, step * CHANNELS])
        sums = tl.dot(tl.reshape(pixels, (PIXELS, CHANNELS)), tl.trans(filters), sums)
    channel = first + tl.arange(0, FILTERS)
    if scales is not None:
        sums *= tl.load(scales + phase * OUT + channel)[None, :]
    sums += tl.load(bias + channel).to(tl.float32)[None, :]
    if norm_weight is not None:
        sums *= tl.rsqrt(tl.sum(sums * sums, 1) / OUT + EPS)[:, None]
        sums = sums * tl.load(norm_weight + channel).to(tl.float32)[None, :]
        sums += tl.load(norm_bias + channel).to(tl.float32)[None, :]
    if residual is not None:
        sums += tl.reshape(residual.load([image, row, column, first]), (PIXELS, FILTERS)).to(tl.float32)
    if SILU:
        sums = silu(sums, False)
    if codes is not None:
        scaled = e4m3_range(sums * tl.load(out_scale)).to(codes.dtype)
        codes.store([image, row, column, first], tl.reshape(scaled, (1, 1, PIXELS, FILTERS)))
    elif out_scale is not None:
        sums = e4m3_range(sums * tl.load(out_scale))
    if ENLARGE:
        pixel = column + tl.arange(0, PIXELS)
        line = (image * 2 * height + 2 * row + phase // 2).to(tl.int64) * 2 * width
        at = (line + 2 * pixel + phase % 2) * OUT
        tl.store(out + at[:, None] + channel[None, :], sums.to(out.dtype.element_ty), (pixel < width)[:, None])
    else:
        out.store([image, row, column, first], tl.reshape(sums.to(out.dtype), (1, 1, PIXELS, FILTERS)))
