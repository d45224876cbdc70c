"""Group norm followed by SiLU, for images with channels last."""

import torch.nn.functional as F
from torch import Tensor

from solrl_core.kernels.operation import operation


def _out(x: Tensor, *_: object) -> Tensor:
    count, channels, height, width = x.shape
    return x.new_empty(count, height, width, channels).permute(0, 3, 1, 2)


@operation("group_norm_silu", outputs=_out)
def group_norm_silu(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Tensor:
    """SiLU of the group norm of `x`.

    With channels last, a group's channels lie in short runs. The kernel reads whole pixels, for all groups at once.

    Args:
        x: [B, C, H, W], channels last; on a GPU C is a power of two.
        weight, bias: [C], of the norm.
        groups: groups of channels; divides C.
        eps: epsilon of the norm.

    Returns:
        [B, C, H, W], channels last, in `x`'s dtype; computed in float32. Not differentiable.
    """
    if x.device.type != "cuda":
        return plain_group_norm_silu(x, weight, bias, groups, eps)
    from solrl_core.kernels import group_norm_gpu

    out = _out(x)
    given = x.permute(0, 2, 3, 1).contiguous()
    group_norm_gpu.group_norm_silu(given, weight, bias, groups, eps, out.permute(0, 2, 3, 1))
    return out


def plain_group_norm_silu(x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float) -> Tensor:
    """`group_norm_silu` in torch's operations."""
    normed = F.group_norm(x.float(), groups, weight.float(), bias.float(), eps)
    return _out(x).copy_(F.silu(normed))
