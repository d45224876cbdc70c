"""FP8 quantisation of activations with one scale per row, fused with the activation function before it."""

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
"""Upper bound on |GELU(x)| for x < 0. For x > 0 GELU is increasing, so the kernel can compute a row's scale from the
row's largest input, before it evaluates any GELU."""


@operation("quantize_rows")
def quantize_rows(x: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Apply an activation function and quantise the result to E4M3 codes with one float32 scale per row.

    The kernel reads each row from memory once. Torch's separate operations read it twice: for the scale, then for
    the codes.

    Args:
        x: [..., K], float.
        activation: one of `ACTIVATIONS`; "" applies none.

    Returns:
        codes [M, K] and scales [M, 1], whose product is the result; M is the product of the leading axes.
    """
    if x.device.type != "cuda":
        return plain_quantize_rows(x, activation)
    from solrl_core.kernels import rows_gpu

    # The kernel takes the strides of [outer, inner, K], so a slice of a sequence needs no copy.
    x = x if x.ndim == 3 and x.stride(-1) == 1 else x.reshape(1, -1, x.shape[-1]).contiguous()
    count = x.shape[0] * x.shape[1]
    codes = torch.empty(count, x.shape[-1], dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(count, 1, dtype=torch.float32, device=x.device)
    rows_gpu.rows(x, codes, scales, gelu=activation == "gelu_tanh")
    return codes, scales


def plain_quantize_rows(x: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """`quantize_rows` in torch's operations."""
    rows = ACTIVATIONS[activation](x.reshape(-1, x.shape[-1]).float())
    largest = rows.amax(-1, keepdim=True).clamp(min=_GELU_LEAST) if activation else rows.abs().amax(-1, keepdim=True)
    return scaled_rows(rows, largest)


def scaled_rows(rows: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise float32 rows [..., K] with magnitudes up to `largest` [..., 1] to codes [..., K], scales [..., 1]."""
    scale = (largest * (1 / E4M3_MAX)).clamp(min=TINY)
    return scaled_codes(rows, scale.reciprocal()), scale


def scaled_codes(x: Tensor, scale: Tensor | float) -> Tensor:
    """E4M3 codes of `x` times `scale`; values beyond E4M3's range become its largest."""
    return (x.float() * scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
