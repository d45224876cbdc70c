"""Adaptive layer norm fused with FP8 quantisation, with or without the gated residual before it."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from solrl_core.kernels.operation import operation, tl, triton
from solrl_core.kernels.rows import row_scale, scaled_rows

_BLOCK = 512


def _codes(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    codes = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
    return codes, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)


def _sum_and_codes(x: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), *_codes(x)


def plain_norm_modulate_quantize(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    normed = F.layer_norm(x.float(), x.shape[-1:], eps=eps)
    modulated = normed * (1 + scale.float()[:, None]) + shift.float()[:, None]
    return scaled_rows(modulated, modulated.abs().amax(-1, keepdim=True))


def plain_add_norm_modulate_quantize(
    x: Tensor, out: Tensor, gate: Tensor, scale: Tensor, shift: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    total = (x.float() + gate.float()[:, None] * out.float()).to(x.dtype)
    return total, *plain_norm_modulate_quantize(total, scale, shift, eps)


@operation("norm_modulate_quantize", plain_norm_modulate_quantize, outputs=_codes)
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
    codes, scales = _codes(x)
    _launch(x, scale, shift, codes, scales, eps)
    return codes, scales


@operation("add_norm_modulate_quantize", plain_add_norm_modulate_quantize, outputs=_sum_and_codes)
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
    total, codes, scales = _sum_and_codes(x)
    _launch(x, scale, shift, codes, scales, eps, (_dense(out), _dense(gate), total))
    return total, codes, scales


def _launch(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    codes: Tensor,
    scales: Tensor,
    eps: float,
    gated: tuple[Tensor, Tensor, Tensor] | None = None,
) -> None:
    """Compute `norm_modulate_quantize` into `codes` and `scales`, with `gated` (out, gate, total) of x + gate · out.

    That sum is written to `total` first.
    """
    batch, tokens, length = x.shape
    x, scale, shift = _dense(x), _dense(scale), _dense(shift)
    out, gate, total = gated or (x, scale, x)
    strides = [*x.stride()[:2], *out.stride()[:2], gate.stride(0), scale.stride(0), shift.stride(0)]
    _norm_modulate_quantize[(tokens, batch)](
        x,
        out,
        gate,
        scale,
        shift,
        total,
        codes,
        scales,
        tokens,
        eps,
        *strides,
        LENGTH=length,
        BLOCK=_BLOCK,
        GATED=gated is not None,
        num_warps=2,
    )


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


@triton.jit
def _norm_modulate_quantize(
    x,
    out,
    gate,
    scale,
    shift,
    total,
    codes,
    scales,
    tokens,
    eps,
    x_outer,
    x_inner,
    out_outer,
    out_inner,
    gate_outer,
    scale_outer,
    shift_outer,
    LENGTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GATED: tl.constexpr,
):
    """Process one row, held in registers in pieces: padding it to a power of two would waste up to half of the threads.

    `out`, `gate` and `total` are unused unless GATED.
    """
    token = tl.program_id(0).to(tl.int64)
    image = tl.program_id(1).to(tl.int64)
    row = image * tokens + token
    to = row * LENGTH
    x += image * x_outer + token * x_inner
    out += image * out_outer + token * out_inner
    gate += image * gate_outer
    scale += image * scale_outer
    shift += image * shift_outer
    lane = tl.arange(0, BLOCK)

    # No sums yet: all loads are under way before the first value is needed.
    pieces = ()
    for begin in tl.static_range(0, LENGTH, BLOCK):
        at = begin + lane
        v = tl.load(x + at, at < LENGTH, 0).to(tl.float32)
        if GATED:
            o = tl.load(out + at, at < LENGTH, 0).to(tl.float32)
            g = tl.load(gate + at, at < LENGTH, 0).to(tl.float32)
            rounded = (v + g * o).to(total.dtype.element_ty)
            tl.store(total + to + at, rounded, at < LENGTH)
            v = rounded.to(tl.float32)
        pieces = pieces + (v,)
    partial = tl.zeros((BLOCK,), tl.float32)
    for begin in tl.static_range(0, LENGTH, BLOCK):
        partial += pieces[begin // BLOCK]
    mean = tl.sum(partial, 0) / LENGTH
    partial = tl.zeros((BLOCK,), tl.float32)
    for begin in tl.static_range(0, LENGTH, BLOCK):
        v = tl.where(begin + lane < LENGTH, pieces[begin // BLOCK] - mean, 0)
        partial += v * v
    # A compiled caller passes eps in double precision, which has no rsqrt.
    inverse = tl.rsqrt(tl.sum(partial, 0) / LENGTH + eps.to(tl.float32))
    modulated = ()
    for begin in tl.static_range(0, LENGTH, BLOCK):
        at = begin + lane
        s = 1 + tl.load(scale + at, at < LENGTH, 0).to(tl.float32)
        t = tl.load(shift + at, at < LENGTH, 0).to(tl.float32)
        v = (pieces[begin // BLOCK] - mean) * inverse * s + t
        modulated = modulated + (tl.where(at < LENGTH, v, 0),)
    partial = tl.zeros((BLOCK,), tl.float32)
    for begin in tl.static_range(0, LENGTH, BLOCK):
        partial = tl.maximum(partial, tl.abs(modulated[begin // BLOCK]))
    step = row_scale(tl.max(partial, 0))
    tl.store(scales + row, step)
    inverse = tl.div_rn(1.0, step)
    for begin in tl.static_range(0, LENGTH, BLOCK):
        at = begin + lane
        tl.store(codes + to + at, (modulated[begin // BLOCK] * inverse).to(tl.float8e4nv), at < LENGTH)
