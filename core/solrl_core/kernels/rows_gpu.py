"""Triton kernel of FP8 rows and its launcher. Imported only on a GPU.

`solrl_core.kernels.rows` documents the operation and holds the reference implementation in torch.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
# ruff: noqa: N803

import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

_BLOCK = 1024


def rows(x: Tensor, codes: Tensor, scales: Tensor, *, gelu: bool) -> None:
    """Launch `quantize_rows` on `x` [outer, inner, K], whose last axis is contiguous."""
    outer, inner, length = x.shape
    warps = 8 if gelu else 4
    wrap_triton(_rows)[(outer * inner,)](
        x, codes, scales, inner, x.stride(0), x.stride(1), LENGTH=length, BLOCK=_BLOCK, GELU=gelu, num_warps=warps
    )


@triton.jit
def _rows(
    x, codes, scales, inner, outer_stride, inner_stride, LENGTH: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr
):
    """Quantise one row, reading it twice.

    The second read hits the cache. Holding the row in registers would let fewer rows run at once.
    0.1701 is `_GELU_LEAST` of `solrl_core.kernels.rows`.
    """
    row = tl.program_id(0)
    x += (row // inner).to(tl.int64) * outer_stride + (row % inner).to(tl.int64) * inner_stride
    codes += row.to(tl.int64) * LENGTH
    largest = tl.zeros((BLOCK,), tl.float32)
    for begin in tl.static_range(0, LENGTH, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        v = tl.load(x + at, at < LENGTH, 0).to(tl.float32)
        largest = tl.maximum(largest, v if GELU else tl.abs(v))
    amax = tl.max(largest, 0)
    if GELU:
        amax = tl.maximum(_gelu(amax), 0.1701)
    scale = row_scale(amax)
    tl.store(scales + row, scale)
    inverse = tl.div_rn(1.0, scale)
    for begin in tl.static_range(0, LENGTH, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        v = tl.load(x + at, at < LENGTH, 0).to(tl.float32)
        if GELU:
            v = _gelu(v)
        # Rounding may have carried the largest value slightly past 448; the conversion saturates.
        tl.store(codes + at, (v * inverse).to(tl.float8e4nv), at < LENGTH)


@triton.jit
def row_scale(amax):
    """Scale of a row. The constants are E4M3_MAX and TINY of `solrl_core.kernels.rows`."""
    return tl.maximum(amax * (1 / 448.0), 1.1754943508222875e-38)


@triton.jit
def _gelu(v):
    return v * tl.sigmoid(1.5957691216057308 * (v + 0.044715 * v * v * v))
