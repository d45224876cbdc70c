"""RMS norm of each attention head followed by rotary position embedding, for queries and keys."""

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
