"""Triton kernels of norm and rotary positions and their launchers. Imported only on a GPU.

`solrl_core.kernels.rope` documents the operations and holds the reference implementations in torch.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
# ruff: noqa: N803

import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

_HEADS = 8


def rms_norm_rope(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, out: Tensor, first: int, eps: float) -> None:
    """Launch `rms_norm_rope`, writing to `out`; all tensors are contiguous, the head size is a power of two."""
    count, tokens, heads, size = x.shape
    grid = (count * tokens, triton.cdiv(heads, _HEADS))
    wrap_triton(_rms_norm_rope)[grid](
        x, weight, cos, sin, out, tokens, heads, first, eps, SIZE=size, PAIRS=size // 2, HEADS=_HEADS, num_warps=2
    )


@triton.jit
def _rms_norm_rope(
    x,
    weight,
    cos,
    sin,
    out,
    tokens,
    heads,
    first,
    eps,
    SIZE: tl.constexpr,
    PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    at = row.to(tl.int64) * heads * SIZE + head[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    here = (head < heads)[:, None]
    v = tl.load(x + at, here, 0).to(tl.float32)
    v *= tl.rsqrt(tl.sum(v * v, 1) / SIZE + eps)[:, None]
    v *= tl.load(weight + tl.arange(0, SIZE)).to(tl.float32)[None, :]
    even, odd = tl.split(tl.reshape(v, (HEADS, PAIRS, 2)))
    angle = (first + row % tokens) * SIZE + 2 * tl.arange(0, PAIRS)
    c = tl.load(cos + angle).to(tl.float32)[None, :]
    s = tl.load(sin + angle).to(tl.float32)[None, :]
    rotated = tl.reshape(tl.join(even * c - odd * s, odd * c + even * s), (HEADS, SIZE))
    tl.store(out + at, rotated.to(out.dtype.element_ty), here)


def rms_norm_rope_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, out: Tensor, first: int, eps: float
) -> None:
    """`solrl_core.kernels.rope`'s gradient into `out`; all contiguous, the size of a head a power of two."""
    count, tokens, heads, size = x.shape
    grid = (count * tokens, triton.cdiv(heads, _HEADS))
    wrap_triton(_rms_norm_rope_backward)[grid](
        gradient,
        x,
        weight,
        cos,
        sin,
        out,
        tokens,
        heads,
        first,
        eps,
        SIZE=size,
        PAIRS=size // 2,
        HEADS=_HEADS,
        num_warps=2,
    )


@triton.jit
def _rms_norm_rope_backward(
    gradient,
    x,
    weight,
    cos,
    sin,
    out,
    tokens,
    heads,
    first,
    eps,
    SIZE: tl.constexpr,
    PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    at = row.to(tl.int64) * heads * SIZE + head[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    here = (head < heads)[:, None]
    v = tl.load(x + at, here, 0).to(tl.float32)
    even, odd = tl.split(tl.reshape(tl.load(gradient + at, here, 0).to(tl.float32), (HEADS, PAIRS, 2)))
    angle = (first + row % tokens) * SIZE + 2 * tl.arange(0, PAIRS)
    c = tl.load(cos + angle).to(tl.float32)[None, :]
    s = tl.load(sin + angle).to(tl.float32)[None, :]
    back = tl.reshape(tl.join(even * c + odd * s, odd * c - even * s), (HEADS, SIZE))
    back *= tl.load(weight + tl.arange(0, SIZE)).to(tl.float32)[None, :]
    inverse = tl.rsqrt(tl.sum(v * v, 1) / SIZE + eps)[:, None]
    along = (tl.sum(back * v, 1) / SIZE)[:, None] * inverse * inverse
    tl.store(out + at, ((back - v * along) * inverse).to(out.dtype.element_ty), here)
