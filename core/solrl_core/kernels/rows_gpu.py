"""Triton kernels of FP8 rows and their launcher. Imported only on a GPU.

`solrl_core.kernels.rows` documents the operation and holds the reference implementation in torch.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,assignment"
# ruff: noqa: N803, RUF005

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from solrl_core.kernels.elements_gpu import high, low, tanh

_BLOCK = 1024
_LONGEST = 16384
"""Elements of the longest row that `_packed_rows` holds in registers."""


def rows(x: Tensor, codes: Tensor, scales: Tensor, *, gelu: bool) -> None:
    """Launch `quantize_rows` on `x` [outer, inner, K], whose last axis is contiguous."""
    outer, inner, length = x.shape
    given = (x, codes, scales, inner, x.stride(0), x.stride(1))
    even = all(n % 2 == 0 for n in (length, x.stride(0), x.stride(1), x.storage_offset()))
    if x.dtype == torch.bfloat16 and even and length <= _LONGEST:
        warps = 4 if length <= 4096 else 8
        wrap_triton(_packed_rows)[(outer * inner,)](
            *given, PAIRS=length // 2, BLOCK=128 * warps, GELU=gelu, num_warps=warps
        )
    else:
        warps = 8 if gelu else 4
        wrap_triton(_rows)[(outer * inner,)](*given, LENGTH=length, BLOCK=_BLOCK, GELU=gelu, num_warps=warps)


@triton.jit
def _packed_rows(
    x, codes, scales, inner, outer_stride, inner_stride, PAIRS: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr
):
    """Quantise one row of BF16, reading it once, in pairs: two inputs are an int32, two codes an int16.

    0.1701 is `_GELU_LEAST` of `solrl_core.kernels.rows`.
    """
    row = tl.program_id(0)
    x += (row // inner).to(tl.int64) * outer_stride + (row % inner).to(tl.int64) * inner_stride
    words = x.to(tl.pointer_type(tl.int32), bitcast=True)
    to = codes.to(tl.pointer_type(tl.int16), bitcast=True) + row.to(tl.int64) * PAIRS
    pieces = ()
    largest = tl.zeros((BLOCK,), tl.int32)
    for begin in tl.static_range(0, PAIRS, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        word = tl.load(words + at, at < PAIRS, 0)
        pieces = pieces + (word,)
        largest = _larger(largest, word if GELU else word & 0x7FFF7FFF)
    amax = tl.max(tl.maximum(low(largest), high(largest)), 0)
    if GELU:
        amax = tl.maximum(_gelu(amax), 0.1701)
    scale = row_scale(amax)
    tl.store(scales + row, scale)
    inverse = tl.div_rn(1.0, scale)
    for begin in tl.static_range(0, PAIRS, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        word = pieces[begin // BLOCK]
        if GELU:
            pair = _codes(_scaled_gelu(low(word), inverse), _scaled_gelu(high(word), inverse))
        else:
            pair = _codes(low(word) * inverse, high(word) * inverse)
        tl.store(to + at, pair, at < PAIRS)


@triton.jit
def _rows(
    x, codes, scales, inner, outer_stride, inner_stride, LENGTH: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr
):
    """Quantise one row of any dtype and length, reading it twice; the second read hits the cache."""
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


@triton.jit
def _scaled_gelu(v, inverse):
    """GELU(v) · inverse by the hardware's tanh, whose error of 2**-11 adds at most 2**-12 · |v| to GELU(v)."""
    half = v * (0.5 * inverse)
    inner = v * (0.7978845608028654 + 0.035677408136300125 * (v * v))
    return half * tanh(inner) + half


@triton.jit
def _larger(a, b):
    """The larger ones of two BF16 pairs."""
    return tl.inline_asm_elementwise("max.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, is_pure=True, pack=1)


@triton.jit
def _codes(first, second):
    """E4M3 codes of two float32, as a pair. Values past 448, where rounding carried one there, saturate."""
    return tl.inline_asm_elementwise(
        "{.reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $3, $1; "
        "cvt.rn.satfinite.e4m3x2.f32 b, $4, $2; mov.b32 $0, {a, b};}",
        "=r,f,f,f,f",
        [first, second],
        tl.int16,
        is_pure=True,
        pack=2,
    )
