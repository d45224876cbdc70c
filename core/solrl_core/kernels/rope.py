"""RMS norm of each attention head followed by rotary position embedding, for queries and keys."""

from typing import Any

import torch
from torch import Tensor

from solrl_core.kernels.operation import operation


@operation("rms_norm_rope")
def rms_norm_rope(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, first: int, eps: float) -> Tensor:
    """Normalise each head, then rotate pairs of neighbouring components; all in float32.

    Args:
        x: [B, S, H, D].
        weight: [D], of the norm.
        cos, sin: float32 [N, D], cosine and sine of the angle at each position; both components of a pair hold the
            same value.
        first: position of the first of the S tokens; first + S is at most N.
        eps: epsilon of the norm.

    Returns:
        [B, S, H, D] in `x`'s dtype.

    Source: Su et al., arXiv 2104.09864, with neighbouring components as pairs.
    """
    if x.device.type != "cuda":
        return plain_rms_norm_rope(x, weight, cos, sin, first, eps)
    from solrl_core.kernels import rope_gpu

    x = x.contiguous()
    out = torch.empty_like(x)
    rope_gpu.rms_norm_rope(x, weight, cos.contiguous(), sin.contiguous(), out, first, eps)
    return out


def plain_rms_norm_rope(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, first: int, eps: float) -> Tensor:
    """`rms_norm_rope` in torch's operations."""
    normed = torch.nn.functional.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps)
    even, odd = normed[..., ::2], normed[..., 1::2]
    rows = slice(first, first + x.shape[1])
    c, s = cos[rows, None, ::2], sin[rows, None, ::2]
    return torch.stack([even * c - odd * s, odd * c + even * s], -1).flatten(-2).to(x.dtype)


@operation("rms_norm_rope_backward")
def rms_norm_rope_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, first: int, eps: float
) -> Tensor:
    """Gradient of `rms_norm_rope` for `x`: [B, S, H, D] in its dtype, computed in float32.

    Args:
        gradient: of the output, [B, S, H, D].
        x, weight, cos, sin, first, eps: what the operation was given.
    """
    if x.device.type != "cuda":
        rows = slice(first, first + x.shape[1])
        c, s = cos[rows, None, ::2], sin[rows, None, ::2]
        even, odd = gradient.float()[..., ::2], gradient.float()[..., 1::2]
        back = torch.stack([even * c + odd * s, odd * c - even * s], -1).flatten(-2) * weight.float()
        wide = x.float()
        inverse = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
        along = (back * wide).mean(-1, keepdim=True) * inverse.square()
        return ((back - wide * along) * inverse).to(x.dtype)
    from solrl_core.kernels import rope_gpu

    x = x.contiguous()
    out = torch.empty_like(x)
    rope_gpu.rms_norm_rope_backward(
        gradient.contiguous(), x, weight, cos.contiguous(), sin.contiguous(), out, first, eps
    )
    return out


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, cos, sin, ctx.first, ctx.eps = inputs
    ctx.save_for_backward(x, weight, cos, sin)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    # The norm's weight and the angles are never trained.
    x, weight, cos, sin = ctx.saved_tensors
    return rms_norm_rope_backward(gradient, x, weight, cos, sin, ctx.first, ctx.eps), None, None, None, None, None


rms_norm_rope.register_autograd(_backward, setup_context=_keep_for_backward)  # type: ignore[attr-defined]
