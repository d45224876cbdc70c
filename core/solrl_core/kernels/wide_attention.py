"""Attention with one wide head, as in autoencoders: torch's fused kernels for it are slow or missing."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from solrl_core.kernels.operation import like_first, operation, tl, triton

_QUERIES = 4096
"""Queries whose logits are held at a time: 270 MB for each image of 16,384 tokens."""


def plain_wide_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value)


@operation("wide_attention", plain_wide_attention, outputs=like_first)
def wide_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """softmax(query · keyᵀ / √C) · value. On a GPU the logits pass through memory, in float32.

    Args:
        query: [B, S, C]; on a GPU in 16 bits.
        key, value: [B, T, C].

    Returns:
        [B, S, C] in `query`'s dtype. Not differentiable.
    """
    out = like_first(query)
    for begin in range(0, query.shape[1], _QUERIES):
        rows = slice(begin, begin + _QUERIES)
        logits = torch.bmm(query[:, rows], key.mT, out_dtype=torch.float32)
        weights = logits.new_empty(logits.shape, dtype=query.dtype)
        _write_softmax(logits, query.shape[-1] ** -0.5, weights)
        out[:, rows] = torch.bmm(weights, value)
    return out


def _write_softmax(logits: Tensor, scale: float, out: Tensor) -> None:
    """Write softmax(scale · logits) over the last axis to `out`; both are contiguous, `logits` is float32."""
    length = logits.shape[-1]
    block = triton.next_power_of_2(length)
    warps = min(16, max(4, block // 2048))
    _softmax[(logits.numel() // length,)](logits, out, scale * math.log2(math.e), length, BLOCK=block, num_warps=warps)


@triton.jit
def _softmax(logits, out, scale, length, BLOCK: tl.constexpr):
    """One row, held in registers. Powers are of 2, so `scale` includes log2 e."""
    row = tl.program_id(0).to(tl.int64) * length
    at = tl.arange(0, BLOCK)
    x = tl.load(logits + row + at, at < length, float("-inf")) * scale
    powers = tl.exp2(x - tl.max(x, 0))
    tl.store(out + row + at, (powers / tl.sum(powers, 0)).to(out.dtype.element_ty), at < length)
