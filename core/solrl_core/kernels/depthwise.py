"""SANA's feed-forward between its two pointwise products: SiLU, 3×3 depthwise convolution, gated linear unit."""

import torch.nn.functional as F
from torch import Tensor

from solrl_core.kernels.operation import operation


@operation("silu_depthwise_glu")
def silu_depthwise_glu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """value · SiLU(gate), where (value, gate) are the halves of the depthwise convolution of SiLU(x).

    The convolution moves many numbers and computes little: the kernel reads its input and writes its output, and
    nothing in between.

    Args:
        x: [B, H, W, 2·C], contiguous, as the product before leaves it.
        weight: the convolution's, [2·C, 1, 3, 3].
        bias: [2·C].

    Returns:
        [B, H, W, C] in `x`'s dtype; summed in float32.
    """
    if x.device.type != "cuda":
        inner = F.silu(x.float()).movedim(-1, 1)
        convolved = F.conv2d(inner, weight.float(), bias.float(), padding=1, groups=x.shape[-1]).movedim(1, -1)
        value, gate = convolved.chunk(2, -1)
        return (value * F.silu(gate)).to(x.dtype).contiguous()
    from solrl_core.kernels import gpu

    out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    gpu.silu_depthwise_glu(x.contiguous(), weight.flatten(1).mT.contiguous(), bias, out)
    return out
