"""RMS norm of each attention head followed by rotary position embedding, for queries and keys."""

from typing import Any

import torch
from torch import Tensor

from solrl_core.kernels.elements import high, low
from solrl_core.kernels.operation import like_first, operation, tl, triton

_HEADS = 8
_PARTS = 3
"""Most times `_HEADS` heads that a program processes."""


def _out(x: Tensor, text: Tensor | None) -> Tensor:
    tokens = x.shape[1] + (0 if text is None else text.shape[1])
    return x.new_empty(len(x), tokens, *x.shape[2:])


def plain_rms_norm_rope(
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    text: Tensor | None = None,
    text_weight: Tensor | None = None,
) -> Tensor:
    if text is None or text_weight is None:
        return _of_one_part(x, weight, cos, sin, eps)
    first = text.shape[1]
    of_image = _of_one_part(x, weight, cos[first:], sin[first:], eps)
    return torch.cat([_of_one_part(text, text_weight, cos, sin, eps), of_image], 1)


def _of_one_part(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    normed = torch.nn.functional.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps)
    even, odd = normed[..., ::2], normed[..., 1::2]
    c, s = cos[: x.shape[1], None], sin[: x.shape[1], None]
    return torch.stack([even * c - odd * s, odd * c + even * s], -1).flatten(-2).to(x.dtype)


@operation("rms_norm_rope", plain_rms_norm_rope, outputs=lambda x, weight, cos, sin, eps, text=None, *_: _out(x, text))
def rms_norm_rope(
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    text: Tensor | None = None,
    text_weight: Tensor | None = None,
) -> Tensor:
    """Normalise each head, then rotate pairs of neighbouring components; all in float32.

    Text tokens with a norm of their own come first in the result. So it needs no concatenation.

    Args:
        x: [B, S, H, D].
        weight: [D], of the norm.
        cos, sin: float32 [N, D/2], cosine and sine of each pair's angle at each position; T + S is at most N.
        eps: epsilon of the norms.
        text: [B, T, H, D] in `x`'s dtype; None for T = 0.
        text_weight: [D], of the text's norm; given with `text`.

    Returns:
        [B, T + S, H, D] in `x`'s dtype.

    Source: Su et al., arXiv 2104.09864, with neighbouring components as pairs.
    """
    parts = [(x.contiguous(), weight)]
    if text is not None and text_weight is not None:
        parts.insert(0, (text.contiguous(), text_weight))
    out = _out(x, text)
    count, tokens, heads, size = out.shape
    groups = triton.cdiv(heads, _HEADS * _PARTS)
    packed = all(t.dtype == torch.bfloat16 and t.storage_offset() % 2 == 0 for part in parts for t in part)
    _rms_norm_rope[(count * tokens, groups)](
        *parts[-1],
        *parts[0],
        cos.contiguous(),
        sin.contiguous(),
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
    return out


def _plain_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, first: int, eps: float
) -> Tensor:
    rows = slice(first, first + x.shape[1])
    c, s = cos[rows, None], sin[rows, None]
    even, odd = gradient.float()[..., ::2], gradient.float()[..., 1::2]
    back = torch.stack([even * c + odd * s, odd * c - even * s], -1).flatten(-2) * weight.float()
    wide = x.float()
    inverse = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    along = (back * wide).mean(-1, keepdim=True) * inverse.square()
    return ((back - wide * along) * inverse).to(x.dtype).contiguous()


@operation("rms_norm_rope_backward", _plain_backward, outputs=lambda gradient, x, *_: like_first(x))
def rms_norm_rope_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, first: int, eps: float
) -> Tensor:
    """Gradient of `rms_norm_rope` for one of its parts: [B, S, H, D] in its dtype, computed in float32.

    Args:
        gradient: gradient of the output, [B, S, H, D].
        x, weight, cos, sin, eps: what the operation was given.
        first: position of the first of the S tokens.
    """
    x = x.contiguous()
    out = like_first(x)
    count, tokens, heads, size = x.shape
    _rms_norm_rope_backward[(count * tokens, triton.cdiv(heads, _HEADS))](
        gradient.contiguous(),
        x,
        weight,
        cos.contiguous(),
        sin.contiguous(),
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
    return out


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, cos, sin, ctx.eps, text, text_weight = inputs
    ctx.save_for_backward(x, weight, cos, sin, text, text_weight)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    # The norms' weights and the angles are never trained.
    x, weight, cos, sin, text, text_weight = ctx.saved_tensors
    first = 0 if text is None else text.shape[1]
    of_image = rms_norm_rope_backward(gradient[:, first:], x, weight, cos, sin, first, ctx.eps)
    if text is None:
        return of_image, None, None, None, None, None, None
    of_text = rms_norm_rope_backward(gradient[:, :first], text, text_weight, cos, sin, 0, ctx.eps)
    return of_image, None, None, None, None, of_text, None


rms_norm_rope.register_autograd(_backward, setup_context=_keep_for_backward)  # type: ignore[attr-defined]


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
