"""Triton kernels of norm and rotary positions and their launchers. Imported only on a GPU.

`solrl_core.kernels.rope` documents the operations and holds the reference implementations in torch.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,assignment,var-annotated"
# ruff: noqa: N803, RUF005

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from solrl_core.kernels.elements_gpu import high, low

_HEADS = 8
_PARTS = 3
"""Most times `_HEADS` heads that a program processes."""


def rms_norm_rope(parts: Sequence[tuple[Tensor, Tensor]], cos: Tensor, sin: Tensor, out: Tensor, eps: float) -> None:
    """Launch `rms_norm_rope` for one or two (tokens, weight of their norm), one after the other in `out`.

    All tensors are contiguous, the head size is a power of two.
    """
    (text, text_weight), (x, weight) = parts[0], parts[-1]
    count, tokens, heads, size = out.shape
    groups = triton.cdiv(heads, _HEADS * _PARTS)
    packed = all(t.dtype == torch.bfloat16 and t.storage_offset() % 2 == 0 for part in parts for t in part)
    _rms_norm_rope[(count * tokens, groups)](
        x,
        weight,
        text,
        text_weight,
        cos,
        sin,
        out,
        tokens,
        tokens - x.shape[1],
        heads,
        eps,
        PAIRS=size // 2,
        HEADS=_HEADS,
        PARTS=triton.cdiv(heads, _HEADS * groups),
        PACKED=packed,
        num_warps=4,
    )


@triton.jit
def _rms_norm_rope(
    x,
    weight,
    text,
    text_weight,
    cos,
    sin,
    out,
    tokens,
    first,
    heads,
    eps,
    PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Process PARTS times HEADS heads of one token. The first `first` of the `tokens` of an image are `text`'s."""
    to = tl.program_id(0)
    image = to // tokens
    position = to % tokens
    # All threads load what they need themselves: sharing it between the heads takes longer.
    angle = position * PAIRS + tl.zeros((HEADS,), tl.int32)[:, None] + tl.arange(0, PAIRS)[None, :]
    c = tl.load(cos + angle)
    s = tl.load(sin + angle)
    if position < first:
        _heads(text, text_weight, c, s, out, image * first + position, to, heads, eps, PAIRS, HEADS, PARTS, PACKED)
    else:
        row = to - (image + 1) * first
        _heads(x, weight, c, s, out, row, to, heads, eps, PAIRS, HEADS, PARTS, PACKED)


@triton.jit
def _heads(
    x,
    weight,
    c,
    s,
    out,
    row,
    to,
    heads,
    eps,
    PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Process heads of token `row` of `x`, which is token `to` of `out`. All loads come first."""
    x += row.to(tl.int64) * heads * (2 * PAIRS)
    out += to.to(tl.int64) * heads * (2 * PAIRS)
    pair = tl.arange(0, PAIRS)[None, :]
    begin = tl.program_id(1) * PARTS * HEADS + tl.arange(0, HEADS)[:, None]
    pieces = ()
    for part in tl.static_range(PARTS):
        head = begin + part * HEADS
        pieces = pieces + (_load(x, head * PAIRS + pair, head < heads, PACKED),)
    even_weight, odd_weight = _load(weight, begin * 0 + pair, begin >= 0, PACKED)
    for part in tl.static_range(PARTS):
        head = begin + part * HEADS
        even, odd = pieces[part]
        inverse = tl.rsqrt(tl.sum(even * even + odd * odd, 1) / (2 * PAIRS) + eps)[:, None]
        even, odd = even * (inverse * even_weight), odd * (inverse * odd_weight)
        _store(out, head * PAIRS + pair, head < heads, even * c - odd * s, odd * c + even * s, PACKED)


@triton.jit
def _load(x, at, here, PACKED: tl.constexpr):
    """Both components of pairs, in float32. PACKED: of BF16, by one load."""
    if PACKED:
        word = tl.load(x.to(tl.pointer_type(tl.int32), bitcast=True) + at, here, 0)
        return low(word), high(word)
    else:
        return tl.load(x + 2 * at, here, 0).to(tl.float32), tl.load(x + 2 * at + 1, here, 0).to(tl.float32)


@triton.jit
def _store(out, at, here, even, odd, PACKED: tl.constexpr):
    if PACKED:
        tl.store(out.to(tl.pointer_type(tl.int32), bitcast=True) + at, _word(even, odd), here)
    else:
        tl.store(out + 2 * at, even.to(out.dtype.element_ty), here)
        tl.store(out + 2 * at + 1, odd.to(out.dtype.element_ty), here)


@triton.jit
def _word(even, odd):
    """Two float32 as a BF16 pair."""
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [even, odd], tl.int32, is_pure=True, pack=1
    )


def rms_norm_rope_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, out: Tensor, first: int, eps: float
) -> None:
    """`solrl_core.kernels.rope`'s gradient into `out`; all contiguous, the size of a head a power of two."""
    count, tokens, heads, size = x.shape
    grid = (count * tokens, triton.cdiv(heads, _HEADS))
    _rms_norm_rope_backward[grid](
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
    angle = (first + row % tokens) * PAIRS + tl.arange(0, PAIRS)
    c = tl.load(cos + angle).to(tl.float32)[None, :]
    s = tl.load(sin + angle).to(tl.float32)[None, :]
    back = tl.reshape(tl.join(even * c + odd * s, odd * c - even * s), (HEADS, SIZE))
    back *= tl.load(weight + tl.arange(0, SIZE)).to(tl.float32)[None, :]
    inverse = tl.rsqrt(tl.sum(v * v, 1) / SIZE + eps)[:, None]
    along = (tl.sum(back * v, 1) / SIZE)[:, None] * inverse * inverse
    tl.store(out + at, ((back - v * along) * inverse).to(out.dtype.element_ty), here)
