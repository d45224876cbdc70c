"""Triton kernel of adaptive layer norms and its launcher. Imported only on a GPU.

`solrl_core.kernels.modulate` documents the operations and holds the reference implementations in torch.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call,assignment"
# ruff: noqa: N803, RUF005

import triton
import triton.language as tl
from torch import Tensor

from solrl_core.kernels.rows_gpu import row_scale

_BLOCK = 512


def norm_modulate_quantize(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    codes: Tensor,
    scales: Tensor,
    eps: float,
    gated: tuple[Tensor, Tensor, Tensor] | None = None,
) -> None:
    """Launch `norm_modulate_quantize`, writing to `codes` and `scales`; all last axes are contiguous.

    Args:
        gated: (out, gate, total) for `add_norm_modulate_quantize`: first writes x + gate · out to `total`, which
            is contiguous, and then works on that sum.
    """
    batch, tokens, length = x.shape
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
