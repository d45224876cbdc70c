"""Linear attention over several scales, as in the autoencoder of SANA."""

import torch
from torch import Tensor

from solrl_core.kernels.linear_attention import plain_linear_attention
from solrl_core.kernels.operation import operation

HEAD_SIZE = 32
"""Size of a head for which there is a kernel."""


def _out(qkv: Tensor, scaled: list[Tensor], weights: list[Tensor]) -> Tensor:
    return qkv.new_empty(*qkv.shape[:2], (1 + len(scaled)) * qkv.shape[-1] // 3)


@operation("multiscale_attention", outputs=_out)
def multiscale_attention(qkv: Tensor, scaled: list[Tensor], weights: list[Tensor]) -> Tensor:
    """Project the scales, then attend as `linear_attention` does, in each head of each scale.

    A head's query, key and value are neighbouring groups of channels. Each group of a scale has its own projection.
    The kernels project while they attend, so no projected tensor is stored.

    Args:
        qkv: [B, S, 3·C], the first scale, which is not projected.
        scaled: the further scales, [B, S, 3·C] each.
        weights: their projections, [groups, size, size] each, out before in; `size` channels are a group.

    Returns:
        [B, S, scales·C], contiguous, in `qkv`'s dtype. Projections are rounded to it; sums are in float32, and rounded
        to 16 bits of mantissa by the kernel, which is for BF16 and `HEAD_SIZE`. Not differentiable.
    """
    fits = qkv.dtype == torch.bfloat16 and all(weight.shape[-1] == HEAD_SIZE for weight in weights)
    if qkv.device.type != "cuda" or not weights or not fits:
        return plain_multiscale_attention(qkv, scaled, weights)
    from solrl_core.kernels import multiscale_attention_gpu

    out = _out(qkv, scaled, weights)
    parts = out.chunk(1 + len(scaled), -1)
    for x, weight, part in zip((qkv, *scaled), (None, *weights), parts, strict=True):
        own = None if weight is None else weight.contiguous()
        multiscale_attention_gpu.attend_scale(x.contiguous(), own, part)
    return out


def plain_multiscale_attention(qkv: Tensor, scaled: list[Tensor], weights: list[Tensor]) -> Tensor:
    """`multiscale_attention` in torch's operations."""
    size = weights[0].shape[-1]
    projected = [_project(x, weight) for x, weight in zip(scaled, weights, strict=True)]
    heads = torch.cat([qkv, *projected], -1).view(*qkv.shape[:2], -1, 3, size)
    query, key, value = (part.flatten(2) for part in heads.unbind(-2))
    return plain_linear_attention(query, key, value, heads.shape[2]).contiguous()


def _project(x: Tensor, weight: Tensor) -> Tensor:
    groups = x.reshape(*x.shape[:2], len(weight), -1)
    return torch.einsum("bsgi,goi->bsgo", groups, weight).flatten(2)
