"""Group norm followed by SiLU, for images with channels last."""

import torch
import torch.nn.functional as F
from torch import Tensor

from solrl_core.kernels.operation import operation
from solrl_core.kernels.rows import scaled_codes


def rows(x: Tensor) -> Tensor:
    """Images [B, C, H, W] as [B, H, W, C], contiguous; a view if the channels are last in memory."""
    return x.permute(0, 2, 3, 1).contiguous()


def _out(x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float, out_scale: Tensor | None = None) -> Tensor:
    count, channels, height, width = x.shape
    dtype = x.dtype if out_scale is None else torch.float8_e4m3fn
    return x.new_empty(count, height, width, channels, dtype=dtype).permute(0, 3, 1, 2)


@operation("group_norm_silu", outputs=_out)
def group_norm_silu(
    x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float, out_scale: Tensor | None
) -> Tensor:
    """SiLU of the group norm of `x`.

    With channels last, a group's channels lie in short runs. The kernels read whole pixels, for all groups at once.

    Args:
        x: [B, C, H, W], channels last; on a GPU C is a power of two.
        groups: groups of channels; divides C.
        weight, bias: [C], of the norm.
        eps: epsilon of the norm.
        out_scale: None, or the scale, a float32 scalar, of E4M3 codes to return.

    Returns:
        [B, C, H, W], channels last, in `x`'s dtype or as codes; computed in float32. Not differentiable.
    """
    if x.device.type != "cuda":
        return plain_group_norm_silu(x, groups, weight, bias, eps, out_scale)
    from solrl_core.kernels import group_norm_gpu

    out = _out(x, groups, weight, bias, eps, out_scale)
    group_norm_gpu.group_norm_silu(rows(x), groups, weight, bias, eps, out.permute(0, 2, 3, 1), out_scale)
    return out


def plain_group_norm_silu(
    x: Tensor, groups: int, weight: Tensor, bias: Tensor, eps: float, out_scale: Tensor | None = None
) -> Tensor:
    """`group_norm_silu` in torch's operations."""
    activated = F.silu(F.group_norm(x.float(), groups, weight.float(), bias.float(), eps))
    codes = activated if out_scale is None else scaled_codes(activated, out_scale)
    return _out(x, groups, weight, bias, eps, out_scale).copy_(codes)
