"""Matrix product of E4M3 codes with a scale for each row of both factors."""

import torch
import torch.nn.functional as F
from torch import Tensor

from solrl_core.kernels.operation import operation


def _outputs(codes: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None) -> Tensor:
    return torch.empty(len(codes), len(weight), dtype=torch.bfloat16, device=codes.device)


@operation("row_product", _outputs)
def row_product(codes: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None) -> Tensor:
    """(codes · scales) × (weight · weight_scales)ᵀ + bias.

    Args:
        codes: E4M3 [M, K]; its rows may be far apart, as those of `weight` may.
        scales: float32 [M, 1].
        weight: E4M3 [N, K].
        weight_scales: float32 [N, 1].
        bias: [N].

    Returns:
        bfloat16 [M, N].
    """
    if codes.device.type != "cuda":
        left, right = codes.float() * scales, weight.float() * weight_scales
        return F.linear(left, right, None if bias is None else bias.float()).to(torch.bfloat16)
    from solrl_core.kernels import row_product_gpu

    out = _outputs(codes, scales, weight, weight_scales, bias)
    row_product_gpu.product(codes, scales, weight, weight_scales, bias, out)
    return out
