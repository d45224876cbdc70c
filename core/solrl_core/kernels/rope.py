"""RMS norm of each attention head followed by rotary position embedding, for queries and keys."""

from typing import Any

import torch
from torch import Tensor

from solrl_core.kernels.operation import operation


def _out(
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    text: Tensor | None = None,
    text_weight: Tensor | None = None,
) -> Tensor:
    tokens = x.shape[1] + (0 if text is None else text.shape[1])
    return x.new_empty(len(x), tokens, *x.shape[2:])


@operation("rms_norm_rope", outputs=_out)
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
        text_weight: [D], of the text's norm.

    Returns:
        [B, T + S, H, D] in `x`'s dtype.

    Source: Su et al., arXiv 2104.09864, with neighbouring components as pairs.
    """
    if (text is None) != (text_weight is None):
        raise ValueError("got text tokens or the weight of their norm; expected both, or neither")
    if x.device.type != "cuda":
        return plain_rms_norm_rope(x, weight, cos, sin, eps, text, text_weight)
    from solrl_core.kernels import rope_gpu

    parts = [(x.contiguous(), weight)]
    if text is not None and text_weight is not None:
        parts.insert(0, (text.contiguous(), text_weight))
    out = _out(x, weight, cos, sin, eps, text)
    rope_gpu.rms_norm_rope(parts, cos.contiguous(), sin.contiguous(), out, eps)
    return out


def plain_rms_norm_rope(
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    text: Tensor | None = None,
    text_weight: Tensor | None = None,
) -> Tensor:
    """`rms_norm_rope` in torch's operations."""
    if text is None or text_weight is None:
        return _of_one_part(x, weight, cos, sin, eps)
    first = text.shape[1]
    own = _of_one_part(x, weight, cos[first:], sin[first:], eps)
    return torch.cat([_of_one_part(text, text_weight, cos, sin, eps), own], 1)


def _of_one_part(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    normed = torch.nn.functional.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps)
    even, odd = normed[..., ::2], normed[..., 1::2]
    c, s = cos[: x.shape[1], None], sin[: x.shape[1], None]
    return torch.stack([even * c - odd * s, odd * c + even * s], -1).flatten(-2).to(x.dtype)


@operation("rms_norm_rope_backward", outputs=lambda gradient, x, *_: x.new_empty(x.shape))
def rms_norm_rope_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, first: int, eps: float
) -> Tensor:
    """Gradient of `rms_norm_rope` for one of its parts: [B, S, H, D] in its dtype, computed in float32.

    Args:
        gradient: of the output, [B, S, H, D].
        x, weight, cos, sin, eps: what the operation was given.
        first: position of the first of the S tokens.
    """
    if x.device.type != "cuda":
        rows = slice(first, first + x.shape[1])
        c, s = cos[rows, None], sin[rows, None]
        even, odd = gradient.float()[..., ::2], gradient.float()[..., 1::2]
        back = torch.stack([even * c + odd * s, odd * c - even * s], -1).flatten(-2) * weight.float()
        wide = x.float()
        inverse = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
        along = (back * wide).mean(-1, keepdim=True) * inverse.square()
        return ((back - wide * along) * inverse).to(x.dtype).contiguous()
    from solrl_core.kernels import rope_gpu

    x = x.contiguous()
    out = torch.empty_like(x)
    rope_gpu.rms_norm_rope_backward(
        gradient.contiguous(), x, weight, cos.contiguous(), sin.contiguous(), out, first, eps
    )
    return out


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, cos, sin, ctx.eps, text, text_weight = inputs
    ctx.save_for_backward(x, weight, cos, sin, text, text_weight)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    # The norms' weights and the angles are never trained.
    x, weight, cos, sin, text, text_weight = ctx.saved_tensors
    first = 0 if text is None else text.shape[1]
    own = rms_norm_rope_backward(gradient[:, first:], x, weight, cos, sin, first, ctx.eps)
    if text is None:
        return own, None, None, None, None, None, None
    of_text = rms_norm_rope_backward(gradient[:, :first], text, text_weight, cos, sin, 0, ctx.eps)
    return own, None, None, None, None, of_text, None


rms_norm_rope.register_autograd(_backward, setup_context=_keep_for_backward)  # type: ignore[attr-defined]
