"""Attention whose logits are known to be small, so that the softmax needs no running maximum.

This holds for queries and keys that are RMS-normed: a normed vector of size D has at most the length √D before it is
multiplied by the norm's weights.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from solrl_core.kernels.operation import has_descriptors, operation

HEAD_SIZES = (16, 32, 64)
"""Sizes of a head for which there is a kernel."""
LARGEST_LOGIT = 69.0
"""Largest |logit| that needs no maximum: exp(69) is 2**100, which leaves 2**27 for the sums over the keys."""
_ROUNDING = 1.02
"""Margin for queries and keys that are rounded to BF16 after the norm, and for the norm's own rounding."""


def _out(query: Tensor, *_: Tensor) -> Tensor:
    return query.new_empty(query.shape)


@operation("bounded_attention", outputs=_out)
def bounded_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """softmax(query · keyᵀ / √D) · value for each head, for logits that do not exceed `LARGEST_LOGIT`.

    Args:
        query: [B, S, H, D]; on a GPU in BF16, with D one of `HEAD_SIZES`.
        key, value: [B, T, H, D].

    Returns:
        [B, S, H, D] in `query`'s dtype, accumulated in float32. Not differentiable.
    """
    if query.device.type != "cuda":
        return plain_bounded_attention(query, key, value)
    from solrl_core.kernels import bounded_attention_gpu

    out = _out(query)
    bounded_attention_gpu.bounded_attention(query.contiguous(), key.contiguous(), value.contiguous(), out)
    return out


def plain_bounded_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """`bounded_attention` in torch's operations."""
    wide_query, wide_key, wide_value = (x.float().transpose(1, 2) for x in (query, key, value))
    powers = (wide_query @ wide_key.mT / math.sqrt(query.shape[-1])).exp()
    attended = powers @ wide_value / powers.sum(-1, keepdim=True)
    return attended.transpose(1, 2).to(query.dtype).contiguous()


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
