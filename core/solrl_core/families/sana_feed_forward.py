"""SANA's feed-forward on a GPU: channels last throughout, and one kernel between the two products."""

import torch.nn.functional as F
from torch import Tensor, nn

from solrl_core.kernels import silu_depthwise_glu


class FusedFeedForward(nn.Module):
    """diffusers' `GLUMBConv`, as SANA's blocks use it (no norm, no residual of its own), with the same parts."""

    def __init__(self, feed_forward: nn.Module) -> None:
        super().__init__()
        self.conv_inverted = feed_forward.get_submodule("conv_inverted")
        self.conv_depth = feed_forward.get_submodule("conv_depth")
        self.conv_point = feed_forward.get_submodule("conv_point")

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] → [B, C, H, W], both channels-last in memory."""
        depth = self.conv_depth
        wide = _pointwise(self.conv_inverted, x.movedim(1, -1))
        gated = silu_depthwise_glu(wide, depth.get_parameter("weight"), depth.get_parameter("bias"))
        return _pointwise(self.conv_point, gated).movedim(-1, 1)


def _pointwise(conv: nn.Module, x: Tensor) -> Tensor:
    """A 1×1 convolution over the last axis of [B, H, W, C]."""
    if isinstance(conv, nn.Conv2d):
        return F.linear(x, conv.weight.flatten(1), conv.bias)
    out: Tensor = conv(x.movedim(-1, 1))
    return out.movedim(1, -1)
