"""Gated depthwise convolution: SiLU, 3×3 depthwise convolution and GLU, the middle of SANA's feed-forward."""

import torch.nn.functional as F
from torch import Tensor

from solrl_core.kernels.operation import operation


@operation("silu_depthwise_glu")
def silu_depthwise_glu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Convolve SiLU(x) depthwise, split the channels into (value, gate) and return value · SiLU(gate).

    The operation is bound by memory bandwidth, so the kernel stores no intermediate.

    Args:
        x: [B, H, W, 2·C], contiguous: the output of the first pointwise convolution, channels last.
        weight: [2·C, 1, 3, 3], of the depthwise convolution.
        bias: [2·C], of the depthwise convolution.

    Returns:
        [B, H, W, C] in `x`'s dtype, accumulated in float32. For inputs of 16 bits, the kernel's SiLU has the error of
        a hardware's tanh, 2**-11.
    """
    if x.device.type != "cuda":
        return plain_silu_depthwise_glu(x, weight, bias)
    from solrl_core.kernels import depthwise_gpu

    out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    depthwise_gpu.silu_depthwise_glu(x.contiguous(), weight.flatten(1).mT.contiguous(), bias, out)
    return out


def plain_silu_depthwise_glu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`silu_depthwise_glu` in torch's operations."""
    inner = F.silu(x.float()).movedim(-1, 1)
    convolved = F.conv2d(inner, weight.float(), bias.float(), padding=1, groups=x.shape[-1]).movedim(1, -1)
    value, gate = convolved.chunk(2, -1)
    return (value * F.silu(gate)).to(x.dtype).contiguous()
