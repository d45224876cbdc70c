"""Candidate for norm, modulation and FP8 rows: a row is held in pieces, not padded to a power of two."""

# ruff: noqa: N803, RUF005

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

SETTINGS = [
    {"BLOCK": 512, "num_warps": 2},
    {"BLOCK": 256, "num_warps": 1},
    {"BLOCK": 256, "num_warps": 2},
    {"BLOCK": 512, "num_warps": 4},
    {"BLOCK": 1024, "num_warps": 4},
]


def norm_modulate_quantize(
    x: Tensor, scale: Tensor, shift: Tensor, eps: float, setting: Mapping[str, int]
) -> tuple[Tensor, Tensor]:
    """The operation of this name of `solrl_core.kernels.modulate`; all last axes are contiguous."""
    codes, scales, _ = _launched(x, None, None, scale, shift, eps, setting)
    return codes, scales


def add_norm_modulate_quantize(
    x: Tensor, out: Tensor, gate: Tensor, scale: Tensor, shift: Tensor, eps: float, setting: Mapping[str, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """The operation of this name of `solrl_core.kernels.modulate`; all last axes are contiguous."""
    codes, scales, total = _launched(x, out, gate, scale, shift, eps, setting)
    return total, codes, scales


def _launched(
    x: Tensor,
    out: Tensor | None,
    gate: Tensor | None,
    scale: Tensor,
    shift: Tensor,
    eps: float,
    setting: Mapping[str, int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and, with `out` and `gate`, the sum x + gate · out."""
    batch, tokens, length = x.shape
    codes = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
    scales = x.new_empty(batch, tokens, 1, dtype=torch.float32)
    gated = out is not None
    total = x.new_empty(x.shape) if gated else x
    out, gate = (x, scale) if out is None or gate is None else (out, gate)
    strides = [*x.stride()[:2], *out.stride()[:2], gate.stride(0), scale.stride(0), shift.stride(0)]
    _norm_modulate_quantize[(batch * tokens,)](
        x, out, gate, scale, shift, total, codes, scales, tokens, eps, *strides, LENGTH=length, GATED=gated, **setting
    )
    return codes, scales, total


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
    row = tl.program_id(0)
    image = (row // tokens).to(tl.int64)
    token = (row % tokens).to(tl.int64)
    to = row.to(tl.int64) * LENGTH
    x += image * x_outer + token * x_inner
    out += image * out_outer + token * out_inner
    gate += image * gate_outer
    scale += image * scale_outer
    shift += image * shift_outer
    lane = tl.arange(0, BLOCK)

    pieces = ()
    partial = tl.zeros((BLOCK,), tl.float32)
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
        partial += v
    mean = tl.sum(partial, 0) / LENGTH
    partial = tl.zeros((BLOCK,), tl.float32)
    for begin in tl.static_range(0, LENGTH, BLOCK):
        v = tl.where(begin + lane < LENGTH, pieces[begin // BLOCK] - mean, 0)
        partial += v * v
    # A compiled caller passes eps in double precision, which has no rsqrt.
    inverse = tl.rsqrt(tl.sum(partial, 0) / LENGTH + eps.to(tl.float32))
    modulated = ()
    partial = tl.zeros((BLOCK,), tl.float32)
    for begin in tl.static_range(0, LENGTH, BLOCK):
        at = begin + lane
        s = tl.load(scale + at, at < LENGTH, 0).to(tl.float32)
        t = tl.load(shift + at, at < LENGTH, 0).to(tl.float32)
        v = (pieces[begin // BLOCK] - mean) * inverse * (1 + s) + t
        v = tl.where(at < LENGTH, v, 0)
        modulated = modulated + (v,)
        partial = tl.maximum(partial, tl.abs(v))
    step = _scale(tl.max(partial, 0))
    tl.store(scales + row, step)
    inverse = tl.div_rn(1.0, step)
    for begin in tl.static_range(0, LENGTH, BLOCK):
        at = begin + lane
        tl.store(codes + to + at, (modulated[begin // BLOCK] * inverse).to(tl.float8e4nv), at < LENGTH)


@triton.jit
def _scale(amax):
    """Scale of a row. The constants are E4M3_MAX and TINY of `solrl_core.kernels.rows`."""
    return tl.maximum(amax * (1 / 448.0), 1.1754943508222875e-38)
