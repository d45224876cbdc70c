"""FP8 quantisation of activations with one scale per row, fused with the activation function before it."""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import wrap_triton

from solrl_core.kernels.elements import high, low, tanh
from solrl_core.kernels.operation import operation, tl, triton

E4M3_MAX = 448.0
TINY = torch.finfo(torch.float32).tiny

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "": lambda x: x,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}

_GELU_LEAST = 0.1701
"""Upper bound on |GELU(x)| for x < 0. For x > 0 GELU is increasing, so the kernel can compute a row's scale from the
row's largest input, before it evaluates any GELU."""

_BLOCK = 1024
_LONGEST = 16384
"""Elements of the longest row that `_packed_rows` holds in registers."""


def plain_quantize_rows(x: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    rows = ACTIVATIONS[activation](x.reshape(-1, x.shape[-1]).float())
    largest = rows.amax(-1, keepdim=True).clamp(min=_GELU_LEAST) if activation else rows.abs().amax(-1, keepdim=True)
    return scaled_rows(rows, largest)


def scaled_rows(rows: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise float32 rows [..., K] with magnitudes up to `largest` [..., 1] to codes [..., K], scales [..., 1]."""
    scale = (largest * (1 / E4M3_MAX)).clamp(min=TINY)
    # Values that rounding carries beyond E4M3's range become its largest.
    return (rows * scale.reciprocal()).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale


@operation("quantize_rows", plain_quantize_rows)
def quantize_rows(x: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Apply an activation function and quantise the result to E4M3 codes with one float32 scale per row.

    The kernel reads each row from memory once. Torch's separate operations read it twice: for the scale, then for
    the codes.

    Args:
        x: [..., K], float.
        activation: one of `ACTIVATIONS`; "" applies none.

    Returns:
        codes [M, K] and scales [M, 1], whose product is the result; M is the product of the leading axes.
    """
    # The kernels take the strides of [outer, inner, K], so a slice of a sequence needs no copy.
    x = x if x.ndim == 3 and x.stride(-1) == 1 else x.reshape(1, -1, x.shape[-1]).contiguous()
    outer, inner, length = x.shape
    codes = torch.empty(outer * inner, length, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(outer * inner, 1, dtype=torch.float32, device=x.device)
    gelu = activation == "gelu_tanh"
    arguments = (x, codes, scales, inner, x.stride(0), x.stride(1))
    even = all(n % 2 == 0 for n in (length, x.stride(0), x.stride(1), x.storage_offset()))
    if x.dtype == torch.bfloat16 and even and length <= _LONGEST:
        warps = 4 if length <= 4096 else 8
        wrap_triton(_packed_rows)[(outer * inner,)](
            *arguments, PAIRS=length // 2, BLOCK=128 * warps, GELU=gelu, num_warps=warps
        )
    else:
        warps = 8 if gelu else 4
        wrap_triton(_rows)[(outer * inner,)](*arguments, LENGTH=length, BLOCK=_BLOCK, GELU=gelu, num_warps=warps)
    return codes, scales


@triton.jit
def _packed_rows(
    x, codes, scales, inner, outer_stride, inner_stride, PAIRS: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr
):
    """Quantise one row of BF16, reading it once, in pairs: two inputs are an int32, two codes an int16.

    0.1701 is `_GELU_LEAST`.
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
    """Scale of a row. The constants are `E4M3_MAX` and `TINY`."""
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
