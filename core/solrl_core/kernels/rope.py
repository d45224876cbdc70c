"""Queries and keys before attention: RMS norm of each head, then rotary position embedding."""

import torch
from torch import Tensor

from solrl_core.kernels.operation import operation


@operation("rms_norm_rope")
def rms_norm_rope(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, first: int, eps: float) -> Tensor:
    """Normalise and rotate, in float32.

    Args:
        x: [B, S, H, D].
        weight: of the norm, [D].
        cos, sin: of the angles, float32 [N, D], each pair of neighbours alike.
        first: position of the first of the S tokens; the last is below N.
        eps: of the norm.

    Returns:
        [B, S, H, D] in `x`'s dtype.

    Source: Su et al., arXiv 2104.09864, with neighbours as pairs.
    """
    if x.device.type != "cuda":
        normed = torch.nn.functional.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps)
        even, odd = normed[..., ::2], normed[..., 1::2]
        rows = slice(first, first + x.shape[1])
        c, s = cos[rows, None, ::2], sin[rows, None, ::2]
        return torch.stack([even * c - odd * s, odd * c + even * s], -1).flatten(-2).to(x.dtype)
    from solrl_core.kernels import gpu

    x = x.contiguous()
    out = torch.empty_like(x)
    gpu.rms_norm_rope(x, weight, cos.contiguous(), sin.contiguous(), out, first, eps)
    return out
