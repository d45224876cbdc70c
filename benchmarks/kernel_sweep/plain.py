"""The candidates' arithmetic in plain torch, for operations that have no reference implementation in the product."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

LARGEST_LOGIT = 69.0
"""Largest |logit| for which the softmax needs no maximum: exp(69) is 2**100, and sums over the keys need a few bits."""

_ROUNDING = 1.02
"""Margin for queries and keys that are rounded to BF16 after the norm, and for the norm's own rounding."""


def linear_attention(query: Tensor, key: Tensor, value: Tensor, heads: int) -> Tensor:
    """relu(query) · Σ relu(key)ᵀ · value / (relu(query) · Σ relu(key)ᵀ) for each head, in float32.

    The same operations as in the product's SANA blocks.

    Args:
        query, key, value: [B, S, C], C channels of all heads.
        heads: number of heads; divides C.

    Returns:
        [B, S, C] in the inputs' dtype.

    Source: Katharopoulos et al., arXiv 2006.16236.
    """
    batch, tokens, _ = query.shape
    query, key, value = (x.mT.reshape(batch, heads, -1, tokens) for x in (query, key, value))
    ones = F.pad(value.float(), (0, 0, 0, 1), value=1.0)  # gives the normaliser
    sums = ones @ F.relu(key).float().mT @ F.relu(query).float()
    attended = sums[:, :, :-1] / (sums[:, :, -1:] + 1e-15)
    return attended.flatten(1, 2).mT.to(query.dtype)


def bounded_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """softmax(query · keyᵀ / √D) · value for each head, in float32, without subtracting a row's maximum.

    Right if no |logit| exceeds `LARGEST_LOGIT`.

    Args:
        query: [B, S, H, D].
        key, value: [B, T, H, D].

    Returns:
        [B, S, H, D] in the inputs' dtype.
    """
    wide_query, wide_key, wide_value = (x.float().transpose(1, 2) for x in (query, key, value))
    powers = (wide_query @ wide_key.mT / math.sqrt(query.shape[-1])).exp()
    return (powers @ wide_value / powers.sum(-1, keepdim=True)).transpose(1, 2).to(query.dtype)


def rms_logit_bound(query_weights: Sequence[Tensor], key_weights: Sequence[Tensor]) -> float:
    """Bound on |query · key| / √D for queries and keys [..., D] that are RMS-normed with any of these weights [D].

    A normed vector has at most the length √D before its weights, so the bound is √D · max |wq · wk|.
    """
    query, key = (torch.stack([w.float().abs() for w in weights]).amax(0) for weights in (query_weights, key_weights))
    return _ROUNDING * float((query * key).max()) * math.sqrt(query.numel())
