"""Linear attention with ReLU as feature map, as in SANA."""

import torch
import torch.nn.functional as F
from torch import Tensor

from solrl_core.kernels.operation import operation

HEAD_SIZES = (8, 16, 32)
"""Sizes of a head for which there is a kernel."""


@operation("linear_attention")
def linear_attention(query: Tensor, key: Tensor, value: Tensor, heads: int) -> Tensor:
    """relu(query) · Σ relu(key)ᵀ · value / (relu(query) · Σ relu(key)ᵀ) for each head; the sums are over the tokens.

    The kernel is for BF16 and heads of `HEAD_SIZES`. It rounds the sums to 16 bits of mantissa.

    Args:
        query, key, value: [B, S, C], float; C channels of all heads.
        heads: number of heads; divides C.

    Returns:
        [B, S, C] in `query`'s dtype, accumulated in float32. Not differentiable: `plain_linear_attention` is.

    Source: Katharopoulos et al., arXiv 2006.16236.
    """
    size = query.shape[-1] // heads
    if query.device.type != "cuda" or query.dtype != torch.bfloat16 or size not in HEAD_SIZES:
        return plain_linear_attention(query, key, value, heads)
    from solrl_core.kernels import linear_attention_gpu

    query = query.contiguous()
    out = torch.empty_like(query)
    linear_attention_gpu.linear_attention(query, key.contiguous(), value.contiguous(), out, size)
    return out


def plain_linear_attention(query: Tensor, key: Tensor, value: Tensor, heads: int) -> Tensor:
    """`linear_attention` in torch's operations, differentiable."""
    dtype, (batch, tokens, _) = query.dtype, query.shape
    query, key, value = (x.mT.reshape(batch, heads, -1, tokens) for x in (query, key, value))
    ones = F.pad(value.float(), (0, 0, 0, 1), value=1.0)  # gives the normaliser
    sums = ones @ F.relu(key).float().mT @ F.relu(query).float()
    attended = sums[:, :, :-1] / (sums[:, :, -1:] + 1e-15)
    return attended.flatten(1, 2).mT.to(dtype)
