"""Attention with one wide head, as in autoencoders, for which torch's fused kernels are slow or missing."""

import torch
import torch.nn.functional as F
from torch import Tensor

from solrl_core.kernels.operation import operation

_QUERIES = 4096
"""Queries whose logits are held at a time: 270 MB for each image of 16,384 tokens."""


def _out(query: Tensor, *_: Tensor) -> Tensor:
    return query.new_empty(query.shape)


@operation("wide_attention", outputs=_out)
def wide_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """softmax(query · keyᵀ / √C) · value. On a GPU the logits pass through memory, in float32.

    Args:
        query: [B, S, C]; on a GPU in 16 bits.
        key, value: [B, T, C].

    Returns:
        [B, S, C] in `query`'s dtype. Not differentiable.
    """
    if query.device.type != "cuda":
        return plain_wide_attention(query, key, value)
    from solrl_core.kernels import wide_attention_gpu

    out = _out(query)
    for begin in range(0, query.shape[1], _QUERIES):
        rows = slice(begin, begin + _QUERIES)
        logits = torch.bmm(query[:, rows], key.mT, out_dtype=torch.float32)
        weights = logits.new_empty(logits.shape, dtype=query.dtype)
        wide_attention_gpu.softmax(logits, query.shape[-1] ** -0.5, weights)
        out[:, rows] = torch.bmm(weights, value)
    return out


def plain_wide_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """`wide_attention` in torch's operations."""
    return F.scaled_dot_product_attention(query, key, value)
