"""Attention whose logits are known to be small, so that the softmax needs no running maximum.

This holds for queries and keys that are RMS-normed: a normed vector of size D has at most the length √D before it is
multiplied by the norm's weights.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from solrl_core.kernels.operation import TensorDescriptor, has_descriptors, like_first, operation, tl, triton

HEAD_SIZES = (16, 32, 64)
"""Head sizes that the kernel supports."""
LARGEST_LOGIT = 69.0
"""Largest |logit| that needs no maximum: exp(69) is 2**100, which leaves 2**27 for the sums over the keys."""
_ROUNDING = 1.02
"""Margin for queries and keys that are rounded to BF16 after the norm, and for the norm's own rounding."""
_QUERIES, _KEYS = 128, 64
"""Tokens that a program computes, and tokens that each of its steps reads."""


def plain_bounded_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    wide_query, wide_key, wide_value = (x.float().transpose(1, 2) for x in (query, key, value))
    powers = (wide_query @ wide_key.mT / math.sqrt(query.shape[-1])).exp()
    attended = powers @ wide_value / powers.sum(-1, keepdim=True)
    return attended.transpose(1, 2).to(query.dtype).contiguous()


@operation("bounded_attention", plain_bounded_attention, outputs=like_first)
def bounded_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """softmax(query · keyᵀ / √D) · value for each head, for logits that do not exceed `LARGEST_LOGIT`.

    Args:
        query: [B, S, H, D]; on a GPU in BF16, with D one of `HEAD_SIZES`.
        key, value: [B, T, H, D].

    Returns:
        [B, S, H, D] in `query`'s dtype, accumulated in float32. Not differentiable.
    """
    out = like_first(query)
    batch, queries, heads, size = query.shape

    def blocks(x: Tensor, rows: int) -> Any:
        # Three axes, so that a block beyond the last token holds zeros and not the next image's tokens.
        return TensorDescriptor.from_tensor(x.contiguous().flatten(2), [1, rows, size])

    _bounded_attention[(triton.cdiv(queries, _QUERIES), heads, batch)](
        blocks(query, _QUERIES),
        blocks(key, _KEYS),
        blocks(value, _KEYS),
        blocks(out, _QUERIES),
        key.shape[1],
        math.log2(math.e) / math.sqrt(size),
        SIZE=size,
        QUERIES=_QUERIES,
        KEYS=_KEYS,
        num_warps=8,
        num_stages=4,
    )
    return out


@triton.jit
def _bounded_attention(
    query,
    key,
    value,
    out,
    keys,
    scale,
    SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Process QUERIES queries of one head. Powers are of 2, so `scale` includes log2 e."""
    image = tl.program_id(2)
    channel = tl.program_id(1) * SIZE
    row = tl.program_id(0) * QUERIES
    q = tl.reshape(query.load([image, row, channel]), (QUERIES, SIZE))
    total = tl.zeros((QUERIES,), tl.float32)
    sums = tl.zeros((QUERIES, SIZE), tl.float32)
    full_keys = keys // KEYS * KEYS
    for begin in range(0, full_keys, KEYS):
        k = tl.reshape(key.load([image, begin, channel]), (KEYS, SIZE))
        powers = tl.exp2(tl.dot(q, tl.trans(k)) * scale)
        total += tl.sum(powers, 1)
        v = tl.reshape(value.load([image, begin, channel]), (KEYS, SIZE))
        sums = tl.dot(powers.to(v.dtype), v, sums)
    if full_keys < keys:
        k = tl.reshape(key.load([image, full_keys, channel]), (KEYS, SIZE))
        powers = tl.exp2(tl.dot(q, tl.trans(k)) * scale)
        powers = tl.where(tl.arange(0, KEYS)[None, :] < keys - full_keys, powers, 0)
        total += tl.sum(powers, 1)
        v = tl.reshape(value.load([image, full_keys, channel]), (KEYS, SIZE))
        sums = tl.dot(powers.to(v.dtype), v, sums)
    result = (sums / total[:, None]).to(q.dtype)
    out.store([image, row, channel], tl.reshape(result, (1, QUERIES, SIZE)))


def are_bounded(query_norms: Sequence[nn.Module | None], key_norms: Sequence[nn.Module | None]) -> bool:
    """Whether `bounded_attention` has a kernel, and is right, for queries and keys [..., D] of any of these norms.

    The kernel needs tensor descriptors, that is a GPU of compute capability 9.0 or above.
    """
    norms = [norm for norm in (*query_norms, *key_norms) if norm is not None and _is_rms(norm)]
    weights = [norm.get_parameter("weight") for norm in norms]
    if len(norms) < len(query_norms) + len(key_norms) or not all(has_descriptors(weight.device) for weight in weights):
        return False
    return logit_bound(weights[: len(query_norms)], weights[len(query_norms) :]) <= LARGEST_LOGIT


def logit_bound(query_weights: Sequence[Tensor], key_weights: Sequence[Tensor]) -> float:
    """Bound on |query · key| / √D for queries and keys [..., D] that are RMS-normed with any of these weights [D]."""
    query, key = (torch.stack([w.float().abs() for w in weights]).amax(0) for weights in (query_weights, key_weights))
    return _ROUNDING * float((query * key).max()) * math.sqrt(query.numel())


def _is_rms(norm: nn.Module) -> bool:
    from diffusers.models.normalization import RMSNorm

    return isinstance(norm, RMSNorm | nn.RMSNorm) and norm.weight is not None and getattr(norm, "bias", None) is None
