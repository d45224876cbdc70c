"""Candidate for SD3.5's attention: queries and keys are RMS-normed, so the softmax needs no running maximum."""

# ruff: noqa: N803

from collections.abc import Mapping

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

_LOG2_E = 1.4426950408889634

_BLOCKS = [
    {"QUERIES": 128, "KEYS": 64, "num_warps": 8, "num_stages": 3},
    {"QUERIES": 128, "KEYS": 128, "num_warps": 8, "num_stages": 2},
    {"QUERIES": 64, "KEYS": 64, "num_warps": 4, "num_stages": 3},
    {"QUERIES": 64, "KEYS": 128, "num_warps": 4, "num_stages": 2},
    {"QUERIES": 128, "KEYS": 64, "num_warps": 4, "num_stages": 3},
]
SETTINGS = [{**blocks, "POLYNOMIAL": polynomial} for polynomial in (0, 1) for blocks in _BLOCKS]


def bounded_attention(query: Tensor, key: Tensor, value: Tensor, setting: Mapping[str, int]) -> Tensor:
    """The operation of `kernel_sweep.plain` on contiguous tensors [B, S or T, H, D], D a power of two.

    Needs tensor descriptors, so a GPU of compute capability 9.0 or above.
    """
    batch, queries, heads, size = query.shape
    out = query.new_empty(query.shape)

    def blocks(x: Tensor, rows: int) -> TensorDescriptor:
        # Three axes, so that a block beyond the last token holds zeros and not the next image's tokens.
        return TensorDescriptor.from_tensor(x.flatten(2), [1, rows, size])

    _bounded_attention[(triton.cdiv(queries, setting["QUERIES"]), heads, batch)](
        blocks(query, setting["QUERIES"]),
        blocks(key, setting["KEYS"]),
        blocks(value, setting["KEYS"]),
        blocks(out, setting["QUERIES"]),
        key.shape[1],
        _LOG2_E * size**-0.5,
        SIZE=size,
        **setting,
    )
    return out


@triton.jit
def _bounded_attention(
    query,
    key,
    value,
    out,
    keys,
    scale,
    SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    POLYNOMIAL: tl.constexpr,
):
    """Process QUERIES queries of one head. Powers are of 2, so `scale` includes log2 e."""
    image = tl.program_id(2)
    channel = tl.program_id(1) * SIZE
    row = tl.program_id(0) * QUERIES
    q = tl.reshape(query.load([image, row, channel]), (QUERIES, SIZE))
    total = tl.zeros((QUERIES,), tl.float32)
    sums = tl.zeros((QUERIES, SIZE), tl.float32)
    whole = keys // KEYS * KEYS
    for begin in range(0, whole, KEYS):
        k = tl.reshape(key.load([image, begin, channel]), (KEYS, SIZE))
        powers = _power(tl.dot(q, tl.trans(k)) * scale, POLYNOMIAL)
        total += tl.sum(powers, 1)
        v = tl.reshape(value.load([image, begin, channel]), (KEYS, SIZE))
        sums = tl.dot(powers.to(v.dtype), v, sums)
    if whole < keys:
        k = tl.reshape(key.load([image, whole, channel]), (KEYS, SIZE))
        powers = _power(tl.dot(q, tl.trans(k)) * scale, POLYNOMIAL)
        powers = tl.where(tl.arange(0, KEYS)[None, :] < keys - whole, powers, 0)
        total += tl.sum(powers, 1)
        v = tl.reshape(value.load([image, whole, channel]), (KEYS, SIZE))
        sums = tl.dot(powers.to(v.dtype), v, sums)
    result = (sums / total[:, None]).to(q.dtype)
    out.store([image, row, channel], tl.reshape(result, (1, QUERIES, SIZE)))


@triton.jit
def _power(x, POLYNOMIAL: tl.constexpr):
    if POLYNOMIAL:
        return _mixed_exp2(x)
    else:
        return tl.exp2(x)


@triton.jit
def _mixed_exp2(x):
    """2**x for |x| < 126: three of four by the special-function unit, one by a polynomial of degree 3.

    The polynomial's relative error is 1e-4; the powers are rounded to BF16 afterwards.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .f32 t, u, p;
        .reg .b32 b, c;
        add.rn.f32 t, $7, 0f4B400000;
        sub.rn.f32 u, t, 0f4B400000;
        sub.rn.f32 u, $7, u;
        fma.rn.f32 p, u, 0f3D61FBAB, 0f3E786F0E;
        fma.rn.f32 p, p, u, 0f3F31798D;
        fma.rn.f32 p, p, u, 0f3F7FFB49;
        mov.b32 b, t;
        shl.b32 b, b, 23;
        mov.b32 c, p;
        add.s32 c, c, b;
        mov.b32 $3, c;
        ex2.approx.ftz.f32 $0, $4;
        ex2.approx.ftz.f32 $1, $5;
        ex2.approx.ftz.f32 $2, $6;
        }""",
        "=&f,=&f,=&f,=&f,f,f,f,f",
        [x],
        tl.float32,
        is_pure=True,
        pack=4,
    )
