"""Triton kernel of the 3×3 convolution and its launcher. Imported only on a GPU.

`solrl_core.kernels.convolve` documents the operation and holds the reference implementation in torch.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
# ruff: noqa: N803, N806

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from solrl_core.kernels.elements_gpu import e4m3_range, silu

_BYTES = 128
"""Bytes of a pixel's channels that a step of the product reads."""


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    scales: Tensor | None,
    out: Tensor,
    pixels: int,
    *,
    enlarge: bool = False,
    silu: bool = False,
    out_scale: Tensor | None = None,
    residual: Tensor | None = None,
    norm: tuple[Tensor, Tensor, float] | None = None,
    codes: Tensor | None = None,
) -> None:
    """Launch `convolve` or `convolve_norm` on `x` [B, H, W, C], writing to `out` [B, H', W', O], and to `codes`.

    `norm` has its weight, bias and epsilon. A program computes `pixels` pixels of a row. All tensors are contiguous. An
    enlarged image has only `silu` and `out_scale`.
    """
    norm_weight, norm_bias, eps = (None, None, 0.0) if norm is None else norm
    count, height, width, channels = x.shape
    outs = out.shape[-1]
    filters = 256 if outs % 256 == 0 else 128
    warps = 8 if pixels * filters > 128 * 128 else 4
    small = torch.cuda.get_device_capability(x.device)[0] == 12  # 99 KiB of shared memory, half of Hopper's
    tiles = triton.cdiv(width, pixels) * height * count
    tile = [1, 1, pixels, filters]
    step = _BYTES // x.element_size()
    _convolve[(tiles * (outs // filters), 4 if enlarge else 1)](
        TensorDescriptor.from_tensor(x, [1, 1, pixels, step]),
        TensorDescriptor.from_tensor(weight, [filters, step]),
        bias,
        scales,
        None if residual is None else TensorDescriptor.from_tensor(residual, tile),
        out if enlarge else TensorDescriptor.from_tensor(out, tile),
        norm_weight,
        norm_bias,
        None if codes is None else TensorDescriptor.from_tensor(codes, tile),
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
    """Compute FILTERS channels of PIXELS pixels in a row of one image; to enlarge, those of one phase.

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
