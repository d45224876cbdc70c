"""Rows of activations to FP8: one scale a row, and the activation function before it in the same pass."""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from solrl_core.kernels.operation import operation

E4M3_MAX = 448.0
TINY = torch.finfo(torch.float32).tiny

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "": lambda x: x,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}

_GELU_LEAST = 0.1701
"""Below zero no GELU is larger in magnitude, and above it grows with its input: so the kernel finds the scale of a
row from the row's largest input, before it computes any GELU."""


@operation("quantize_rows")
def quantize_rows(x: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """E4M3 codes and float32 scales, whose product is the activation of `x`.

    The kernel reads each row from memory once; torch's own operations read it for its largest, then for its codes.

    Args:
        x: [..., K], float.
        activation: one of `ACTIVATIONS`; "" is none.

    Returns:
        codes [M, K] and scales [M, 1], where M is the product of the leading axes.
    """
    if x.device.type != "cuda":
        rows = ACTIVATIONS[activation](x.reshape(-1, x.shape[-1]).float())
        largest = (
            rows.amax(-1, keepdim=True).clamp(min=_GELU_LEAST) if activation else rows.abs().amax(-1, keepdim=True)
        )
        return scaled_rows(rows, largest)
    from solrl_core.kernels import gpu

    # [outer, inner, K] with strides of its own, so that a slice of a sequence need not be copied first.
    x = x if x.ndim == 3 and x.stride(-1) == 1 else x.reshape(1, -1, x.shape[-1]).contiguous()
    count = x.shape[0] * x.shape[1]
    codes = torch.empty(count, x.shape[-1], dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(count, 1, dtype=torch.float32, device=x.device)
    gpu.rows(x, codes, scales, gelu=activation == "gelu_tanh")
    return codes, scales


def scaled_rows(rows: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 codes [..., K] and scales [..., 1] of float32 rows [..., K] with magnitudes up to `largest` [..., 1]."""
    scale = (largest * (1 / E4M3_MAX)).clamp(min=TINY)
    return (rows * scale.reciprocal()).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale
