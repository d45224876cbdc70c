"""Attention whose two products are in FP8, for sequences so long that attention takes most of a pass: clips.

Each block of queries and of keys has its own scale, and each head one for its values, as in SageAttention 2 (Zhang et
al., arXiv 2411.10958), which has INT8 queries and keys.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from solrl_core.kernels.operation import has_descriptors, operation
from solrl_core.kernels.rows import E4M3_MAX, TINY

HEAD_SIZES = (64, 128)
"""Sizes of a head for which there is a kernel."""
QUERIES, KEYS = 64, 128
"""Tokens that share a scale."""
WEIGHT = 256.0
"""Code of a query's largest weight, before the softmax's division."""


def has_fp8_attention(device: torch.device, size: int) -> bool:
    """Whether `fp8_attention` runs on a device for heads of this size."""
    return device.type != "cuda" or (has_descriptors(device) and size in HEAD_SIZES)


def _out(query: Tensor, *_: Tensor) -> Tensor:
    return query.new_empty(query.shape)


@operation("fp8_attention", outputs=_out)
def fp8_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """softmax(query · keyᵀ / √D) · value for each head; queries, keys, values and weights are rounded to E4M3.

    Args:
        query: [B, S, H, D]; on a GPU in BF16, with D one of `HEAD_SIZES`.
        key, value: [B, T, H, D].

    Returns:
        [B, S, H, D] in `query`'s dtype. Not differentiable.
    """
    if query.device.type != "cuda":
        return plain_fp8_attention(query, key, value)
    from solrl_core.kernels import fp8_attention_gpu

    out = _out(query)
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    fp8_attention_gpu.fp8_attention(query, key, value, out, queries=QUERIES, keys=KEYS, weight=WEIGHT)
    return out


def plain_fp8_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """`fp8_attention` in torch's operations."""
    wide_query, wide_key, wide_value = (x.float().transpose(1, 2) for x in (query, key, value))
    logits = _rounded(wide_query, QUERIES) @ _rounded(wide_key, KEYS).mT / math.sqrt(query.shape[-1])
    powers = (logits - logits.amax(-1, keepdim=True)).exp() * WEIGHT
    weights = powers.to(torch.float8_e4m3fn).float()
    attended: Tensor = weights @ _rounded(wide_value, value.shape[1]) / powers.sum(-1, keepdim=True)
    return attended.transpose(1, 2).to(query.dtype).contiguous()


def _rounded(x: Tensor, tokens: int) -> Tensor:
    """x [B, H, S, D] as E4M3 holds it, with one scale for each head's next `tokens`."""
    count = x.shape[2]
    blocks = F.pad(x, (0, 0, 0, -count % tokens)).reshape(*x.shape[:2], -1, tokens, x.shape[3])
    scale = (blocks.abs().amax((-2, -1), keepdim=True) / E4M3_MAX).clamp_min(TINY)
    rounded: Tensor = (blocks / scale).to(torch.float8_e4m3fn).float() * scale
    return rounded.flatten(2, 3)[:, :, :count]
