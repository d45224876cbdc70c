"""Group norm followed by SiLU, for images with channels last.

The norm reads its input once, because the moments come before it: from the convolution that computed the input
(`convolve_moments`), or from `group_moments`.

Moments: float32 [B, parts, 3, groups]. An image has any number of parts; of each group's values in a part they hold
the mean, the sum of squared deviations from it, and the number of values.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from solrl_core.kernels.operation import operation
from solrl_core.kernels.rows import scaled_codes

PART = 1024
"""Pixels in a part of `group_moments`."""


def empty_moments(x: Tensor, parts: int, groups: int) -> Tensor:
    """Moments of images [B, ...] without values; none at all for 0 groups."""
    return x.new_empty(len(x), parts if groups else 0, 3, groups, dtype=torch.float32)


def rows(x: Tensor) -> Tensor:
    """Images [B, C, H, W] as [B, H, W, C], contiguous; a view if the channels are last in memory."""
    return x.permute(0, 2, 3, 1).contiguous()


def _moments(x: Tensor, groups: int) -> Tensor:
    parts = 1 if x.device.type == "cpu" else -(x.shape[-2] * x.shape[-1] // -PART)
    return empty_moments(x, parts, groups)


@operation("group_moments", outputs=_moments)
def group_moments(x: Tensor, groups: int) -> Tensor:
    """Moments of images.

    With channels last, a group's channels lie in short runs. The kernel reads whole pixels, for all groups at once.

    Args:
        x: [B, C, H, W], channels last; on a GPU C is a power of two.
        groups: groups of channels; divides C. 0 for none.

    Returns:
        Moments of `x` in parts of `PART` pixels; on a CPU of one part.
    """
    if x.device.type != "cuda" or not groups:
        return plain_group_moments(x, groups)
    from solrl_core.kernels import group_norm_gpu

    out = _moments(x, groups)
    group_norm_gpu.group_moments(rows(x), out, PART)
    return out


def plain_group_moments(x: Tensor, groups: int) -> Tensor:
    """`group_moments` of one part, in torch's operations."""
    if not groups:
        return empty_moments(x, 0, 0)
    values = x.float().reshape(len(x), groups, -1)
    squares, mean = torch.var_mean(values, -1, correction=0)
    count = torch.full_like(mean, values.shape[-1])
    return torch.stack([mean, squares * count, count], 1)[:, None]


def _out(
    x: Tensor, moments: Tensor, weight: Tensor, bias: Tensor, eps: float, out_scale: Tensor | None = None
) -> Tensor:
    count, channels, height, width = x.shape
    dtype = x.dtype if out_scale is None else torch.float8_e4m3fn
    return x.new_empty(count, height, width, channels, dtype=dtype).permute(0, 3, 1, 2)


@operation("group_norm_silu", outputs=_out)
def group_norm_silu(
    x: Tensor, moments: Tensor, weight: Tensor, bias: Tensor, eps: float, out_scale: Tensor | None
) -> Tensor:
    """SiLU of the group norm of `x`.

    Args:
        x: [B, C, H, W], channels last; on a GPU C is a power of two.
        moments: of `x`, in the groups of the norm.
        weight, bias: [C], of the norm.
        eps: epsilon of the norm.
        out_scale: None, or the scale, a float32 scalar, of E4M3 codes to return.

    Returns:
        [B, C, H, W], channels last, in `x`'s dtype or as codes; computed in float32. Not differentiable.
    """
    if x.device.type != "cuda":
        return plain_group_norm_silu(x, moments, weight, bias, eps, out_scale)
    from solrl_core.kernels import group_norm_gpu

    out = _out(x, moments, weight, bias, eps, out_scale)
    group_norm_gpu.group_norm_silu(rows(x), moments, weight, bias, eps, out.permute(0, 2, 3, 1), out_scale)
    return out


def plain_group_norm_silu(
    x: Tensor, moments: Tensor, weight: Tensor, bias: Tensor, eps: float, out_scale: Tensor | None = None
) -> Tensor:
    """`group_norm_silu` in torch's operations."""
    means, squares, counts = moments.unbind(2)
    total = counts.sum(1)
    mean = (means * counts).sum(1) / total
    variance = (squares + counts * (means - mean[:, None]).square()).sum(1) / total
    grouped = x.float().reshape(len(x), moments.shape[-1], -1, *x.shape[2:])
    normed = (grouped - mean[..., None, None, None]) * (variance + eps).rsqrt()[..., None, None, None]
    scaled = normed.flatten(1, 2) * weight.float()[:, None, None] + bias.float()[:, None, None]
    activated = F.silu(scaled)
    codes = activated if out_scale is None else scaled_codes(activated, out_scale)
    return _out(x, moments, weight, bias, eps, out_scale).copy_(codes)
