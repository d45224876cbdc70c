"""Triton kernel of the product of E4M3 rows and its launcher. Imported only on a GPU.

`solrl_core.kernels.row_product` documents the operation and holds the reference implementation in torch.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
# ruff: noqa: N803

import triton
import triton.language as tl
from torch import Tensor

_ROWS = 128
_OUTS = 128
_STEP = 64
"""Sizes of a tile. Three steps of both factors take 48 KiB of an Ada GPU's 99 KiB of shared memory."""


def product(
    codes: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    """Launch `row_product`, writing to `out` [M, N]. The last axes of `codes` and `weight` are contiguous."""
    (rows, depth), outs = codes.shape, len(weight)
    _product[(triton.cdiv(rows, _ROWS) * triton.cdiv(outs, _OUTS),)](
        codes,
        scales,
        weight,
        weight_scales,
        bias,
        out,
        rows,
        outs,
        codes.stride(0),
        weight.stride(0),
        DEPTH=depth,
        ROWS=_ROWS,
        OUTS=_OUTS,
        STEP=_STEP,
        num_warps=8,
        num_stages=3,
    )


@triton.jit
def _product(
    codes,
    scales,
    weight,
    weight_scales,
    bias,
    out,
    rows,
    outs,
    stride,
    weight_stride,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    OUTS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Compute a tile [ROWS, OUTS]. Tiles of the same rows run beside each other, so that the rows stay in the cache."""
    across = tl.cdiv(outs, OUTS)
    row = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(0) % across * OUTS + tl.arange(0, OUTS)
    at = tl.arange(0, STEP)
    left = codes + row.to(tl.int64)[:, None] * stride + at[None, :]
    right = weight + channel.to(tl.int64)[:, None] * weight_stride + at[None, :]
    sums = tl.zeros((ROWS, OUTS), tl.float32)
    for begin in range(0, DEPTH, STEP):
        inside = (begin + at < DEPTH)[None, :]
        x = tl.load(left + begin, (row < rows)[:, None] & inside, 0.0)
        w = tl.load(right + begin, (channel < outs)[:, None] & inside, 0.0)
        sums = tl.dot(x, tl.trans(w), sums)
    sums *= tl.load(scales + row, row < rows, 0.0)[:, None]
    sums *= tl.load(weight_scales + channel, channel < outs, 0.0)[None, :]
    if bias is not None:
        sums += tl.load(bias + channel, channel < outs, 0.0).to(tl.float32)[None, :]
    to = out + row.to(tl.int64)[:, None] * outs + channel[None, :]
    tl.store(to, sums.to(tl.bfloat16), (row < rows)[:, None] & (channel < outs)[None, :])
