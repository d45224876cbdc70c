"""Adaptive layer norm fused with FP8 quantisation, with or without the gated residual before it."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from solrl_core.kernels.operation import operation
from solrl_core.kernels.rows import scaled_rows


def _codes(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    codes = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
    return codes, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)


def _sum_and_codes(x: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), *_codes(x)


@operation("norm_modulate_quantize", outputs=_codes)
def norm_modulate_quantize(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute norm(x) · (1 + scale) + shift and quantise it to E4M3 codes with one float32 scale per row.

    The arithmetic stays in float32 throughout. Torch's separate operations would round to `x`'s dtype in between;
    skipping that is safe because E4M3 rounds far more coarsely. The kernel stores no intermediate.

    Args:
        x: [B, S, C], float.
        scale, shift: [B, C], float; may be slices of a larger tensor.
        eps: epsilon of the layer norm, which is over C and has no weights.

    Returns:
        codes [B, S, C] and scales [B, S, 1], whose product is the result.
    """
    if x.device.type != "cuda":
        return plain_norm_modulate_quantize(x, scale, shift, eps)
    from solrl_core.kernels import modulate_gpu

    codes, scales = _codes(x)
    modulate_gpu.norm_modulate_quantize(_dense(x), _dense(scale), _dense(shift), codes, scales, eps)
    return codes, scales


@operation("add_norm_modulate_quantize", outputs=_sum_and_codes)
def add_norm_modulate_quantize(
    x: Tensor, out: Tensor, gate: Tensor, scale: Tensor, shift: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Add the gated residual, x + gate · out, and apply `norm_modulate_quantize` to the sum in the same pass.

    The sum is rounded to `x`'s dtype before the norm, so the norm sees the same values as the rest of the block.

    Args:
        x, out: [B, S, C], float.
        gate, scale, shift: [B, C], float; may be slices of a larger tensor.
        eps: epsilon of the layer norm.

    Returns:
        the sum [B, S, C] in `x`'s dtype, codes [B, S, C] and scales [B, S, 1].
    """
    if x.device.type != "cuda":
        return plain_add_norm_modulate_quantize(x, out, gate, scale, shift, eps)
    from solrl_core.kernels import modulate_gpu

    total, codes, scales = _sum_and_codes(x)
    gated = (_dense(out), _dense(gate), total)
    modulate_gpu.norm_modulate_quantize(_dense(x), _dense(scale), _dense(shift), codes, scales, eps, gated)
    return total, codes, scales


def plain_norm_modulate_quantize(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`norm_modulate_quantize` in torch's operations."""
    normed = F.layer_norm(x.float(), x.shape[-1:], eps=eps)
    modulated = normed * (1 + scale.float()[:, None]) + shift.float()[:, None]
    return scaled_rows(modulated, modulated.abs().amax(-1, keepdim=True))


def plain_add_norm_modulate_quantize(
    x: Tensor, out: Tensor, gate: Tensor, scale: Tensor, shift: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`add_norm_modulate_quantize` in torch's operations."""
    total = (x.float() + gate.float()[:, None] * out.float()).to(x.dtype)
    return total, *plain_norm_modulate_quantize(total, scale, shift, eps)


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
