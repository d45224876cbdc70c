"""Triton kernels and their launchers. Imported only on a GPU, where torch ships with Triton.

The module of each operation documents it and holds the reference implementation in torch.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
# ruff: noqa: N803

import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

_BLOCK = 1024
_CHANNELS = 256
_HEADS = 8


def rows(x: Tensor, codes: Tensor, scales: Tensor, *, gelu: bool) -> None:
    """Launch `quantize_rows` on `x` [outer, inner, K], whose last axis is contiguous."""
    outer, inner, length = x.shape
    warps = 8 if gelu else 4
    wrap_triton(_rows)[(outer * inner,)](
        x, codes, scales, inner, x.stride(0), x.stride(1), LENGTH=length, BLOCK=_BLOCK, GELU=gelu, num_warps=warps
    )


@triton.jit
def _rows(
    x, codes, scales, inner, outer_stride, inner_stride, LENGTH: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr
):
    """Quantise one row, reading it twice.

    The second read hits the cache. Holding the row in registers would let fewer rows run at once.
    0.1701 is `_GELU_LEAST` of `solrl_core.kernels.rows`.
    """
    row = tl.program_id(0)
    x += (row // inner).to(tl.int64) * outer_stride + (row % inner).to(tl.int64) * inner_stride
    codes += row.to(tl.int64) * LENGTH
    largest = tl.zeros((BLOCK,), tl.float32)
    for begin in tl.static_range(0, LENGTH, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        v = tl.load(x + at, at < LENGTH, 0).to(tl.float32)
        largest = tl.maximum(largest, v if GELU else tl.abs(v))
    amax = tl.max(largest, 0)
    if GELU:
        amax = tl.maximum(_gelu(amax), 0.1701)
    scale = _scale(amax)
    tl.store(scales + row, scale)
    inverse = tl.div_rn(1.0, scale)
    for begin in tl.static_range(0, LENGTH, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        v = tl.load(x + at, at < LENGTH, 0).to(tl.float32)
        if GELU:
            v = _gelu(v)
        # Rounding may have carried the largest value slightly past 448; the conversion saturates.
        tl.store(codes + at, (v * inverse).to(tl.float8e4nv), at < LENGTH)


@triton.jit
def _scale(amax):
    """Scale of a row. The constants are E4M3_MAX and TINY of `solrl_core.kernels.rows`."""
    return tl.maximum(amax * (1 / 448.0), 1.1754943508222875e-38)


@triton.jit
def _gelu(v):
    return v * tl.sigmoid(1.5957691216057308 * (v + 0.044715 * v * v * v))


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
    block = triton.next_power_of_2(length)
    out, gate, total = gated or (x, scale, x)
    _norm_modulate_quantize[(batch * tokens,)](
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
        x.stride(0),
        x.stride(1),
        out.stride(0),
        out.stride(1),
        gate.stride(0),
        scale.stride(0),
        shift.stride(0),
        LENGTH=length,
        BLOCK=block,
        GATED=gated is not None,
        num_warps=8 if block > 2048 else 4,
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
    """Process one row, held in registers. `out`, `gate` and `total` are unused unless GATED."""
    row = tl.program_id(0)
    image = (row // tokens).to(tl.int64)
    token = (row % tokens).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < LENGTH
    to = row.to(tl.int64) * LENGTH + at
    v = tl.load(x + image * x_outer + token * x_inner + at, inside, 0).to(tl.float32)
    if GATED:
        o = tl.load(out + image * out_outer + token * out_inner + at, inside, 0).to(tl.float32)
        g = tl.load(gate + image * gate_outer + at, inside, 0).to(tl.float32)
        rounded = (v + g * o).to(total.dtype.element_ty)
        tl.store(total + to, rounded, inside)
        v = rounded.to(tl.float32)
    v = tl.where(inside, v - tl.sum(v, 0) / LENGTH, 0)
    # A compiled caller passes eps in double precision, which has no rsqrt.
    v *= tl.rsqrt(tl.sum(v * v, 0) / LENGTH + eps.to(tl.float32))
    s = tl.load(scale + image * scale_outer + at, inside, 0).to(tl.float32)
    t = tl.load(shift + image * shift_outer + at, inside, 0).to(tl.float32)
    v = v * (1 + s) + t
    step = _scale(tl.max(tl.abs(v), 0))
    tl.store(scales + row, step)
    tl.store(codes + to, (v * tl.div_rn(1.0, step)).to(tl.float8e4nv), inside)


def rms_norm_rope(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, out: Tensor, first: int, eps: float) -> None:
    """Launch `rms_norm_rope`, writing to `out`; all tensors are contiguous, the head size is a power of two."""
    count, tokens, heads, size = x.shape
    grid = (count * tokens, triton.cdiv(heads, _HEADS))
    wrap_triton(_rms_norm_rope)[grid](
        x, weight, cos, sin, out, tokens, heads, first, eps, SIZE=size, PAIRS=size // 2, HEADS=_HEADS, num_warps=2
    )


@triton.jit
def _rms_norm_rope(
    x,
    weight,
    cos,
    sin,
    out,
    tokens,
    heads,
    first,
    eps,
    SIZE: tl.constexpr,
    PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    at = row.to(tl.int64) * heads * SIZE + head[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    here = (head < heads)[:, None]
    v = tl.load(x + at, here, 0).to(tl.float32)
    v *= tl.rsqrt(tl.sum(v * v, 1) / SIZE + eps)[:, None]
    v *= tl.load(weight + tl.arange(0, SIZE)).to(tl.float32)[None, :]
    even, odd = tl.split(tl.reshape(v, (HEADS, PAIRS, 2)))
    angle = (first + row % tokens) * SIZE + 2 * tl.arange(0, PAIRS)
    c = tl.load(cos + angle).to(tl.float32)[None, :]
    s = tl.load(sin + angle).to(tl.float32)[None, :]
    rotated = tl.reshape(tl.join(even * c - odd * s, odd * c + even * s), (HEADS, SIZE))
    tl.store(out + at, rotated.to(out.dtype.element_ty), here)


def rms_norm_rope_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, out: Tensor, first: int, eps: float
) -> None:
    """`solrl_core.kernels.rope`'s gradient into `out`; all contiguous, the size of a head a power of two."""
    count, tokens, heads, size = x.shape
    grid = (count * tokens, triton.cdiv(heads, _HEADS))
    wrap_triton(_rms_norm_rope_backward)[grid](
        gradient,
        x,
        weight,
        cos,
        sin,
        out,
        tokens,
        heads,
        first,
        eps,
        SIZE=size,
        PAIRS=size // 2,
        HEADS=_HEADS,
        num_warps=2,
    )


@triton.jit
def _rms_norm_rope_backward(
    gradient,
    x,
    weight,
    cos,
    sin,
    out,
    tokens,
    heads,
    first,
    eps,
    SIZE: tl.constexpr,
    PAIRS: tl.constexpr,
    HEADS: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    at = row.to(tl.int64) * heads * SIZE + head[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    here = (head < heads)[:, None]
    v = tl.load(x + at, here, 0).to(tl.float32)
    even, odd = tl.split(tl.reshape(tl.load(gradient + at, here, 0).to(tl.float32), (HEADS, PAIRS, 2)))
    angle = (first + row % tokens) * SIZE + 2 * tl.arange(0, PAIRS)
    c = tl.load(cos + angle).to(tl.float32)[None, :]
    s = tl.load(sin + angle).to(tl.float32)[None, :]
    back = tl.reshape(tl.join(even * c + odd * s, odd * c - even * s), (HEADS, SIZE))
    back *= tl.load(weight + tl.arange(0, SIZE)).to(tl.float32)[None, :]
    inverse = tl.rsqrt(tl.sum(v * v, 1) / SIZE + eps)[:, None]
    along = (tl.sum(back * v, 1) / SIZE)[:, None] * inverse * inverse
    tl.store(out + at, ((back - v * along) * inverse).to(out.dtype.element_ty), here)


def silu_depthwise_glu(x: Tensor, taps: Tensor, bias: Tensor, out: Tensor) -> None:
    """Launch `silu_depthwise_glu`, writing to `out`. `taps` is the weight as [9, 2·C]; all tensors are contiguous."""
    count, height, width, channels = out.shape
    grid = (triton.cdiv(channels, _CHANNELS), triton.cdiv(height, 2), count)
    wrap_triton(_silu_depthwise_glu)[grid](x, taps, bias, out, height, width, channels, BLOCK=_CHANNELS, num_warps=2)


@triton.jit
def _silu_depthwise_glu(x, taps, bias, out, height, width, channels, BLOCK: tl.constexpr):
    """Compute BLOCK channels of two output rows, sweeping the columns from left to right.

    Each input column contributes to three output columns (left, middle, right), so it is read only once.
    `_left` and `_mid` hold the partial sums of the output columns to the left of and at the current column.
    """
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1) * 2
    inside = c < channels
    both = 2 * channels
    image = tl.program_id(2).to(tl.int64) * height * width

    va = tl.load(bias + c, inside, 0).to(tl.float32)
    ga = tl.load(bias + channels + c, inside, 0).to(tl.float32)
    v0_left, v0_mid, v1_left, v1_mid = va, va, va, va
    g0_left, g0_mid, g1_left, g1_mid = ga, ga, ga, ga
    v00, v01, v02, v10, v11, v12, v20, v21, v22 = _load_3x3(taps + c, both, inside)
    g00, g01, g02, g10, g11, g12, g20, g21, g22 = _load_3x3(taps + channels + c, both, inside)

    for column in range(width + 1):
        here = inside & (column < width)
        at = x + (image + (row - 1) * width + column) * both + c
        down = width * both
        top = here & (row > 0)
        third = here & (row + 1 < height)
        last = here & (row + 2 < height)
        a = _silu(tl.load(at, top, 0).to(tl.float32))
        b = _silu(tl.load(at + down, here, 0).to(tl.float32))
        d = _silu(tl.load(at + 2 * down, third, 0).to(tl.float32))
        e = _silu(tl.load(at + 3 * down, last, 0).to(tl.float32))
        at += channels
        p = _silu(tl.load(at, top, 0).to(tl.float32))
        q = _silu(tl.load(at + down, here, 0).to(tl.float32))
        r = _silu(tl.load(at + 2 * down, third, 0).to(tl.float32))
        s = _silu(tl.load(at + 3 * down, last, 0).to(tl.float32))

        upper = (v0_left + v02 * a + v12 * b + v22 * d) * _silu(g0_left + g02 * p + g12 * q + g22 * r)
        lower = (v1_left + v02 * b + v12 * d + v22 * e) * _silu(g1_left + g02 * q + g12 * r + g22 * s)
        to = out + (image + row * width + column - 1) * channels + c
        done = inside & (column > 0)
        tl.store(to, upper.to(out.dtype.element_ty), done)
        tl.store(to + width * channels, lower.to(out.dtype.element_ty), done & (row + 1 < height))

        v0_left = v0_mid + v01 * a + v11 * b + v21 * d
        v1_left = v1_mid + v01 * b + v11 * d + v21 * e
        g0_left = g0_mid + g01 * p + g11 * q + g21 * r
        g1_left = g1_mid + g01 * q + g11 * r + g21 * s
        v0_mid = va + v00 * a + v10 * b + v20 * d
        v1_mid = va + v00 * b + v10 * d + v20 * e
        g0_mid = ga + g00 * p + g10 * q + g20 * r
        g1_mid = ga + g00 * q + g10 * r + g20 * s


@triton.jit
def _load_3x3(at, stride, inside):
    a = tl.load(at, inside, 0).to(tl.float32)
    b = tl.load(at + stride, inside, 0).to(tl.float32)
    c = tl.load(at + 2 * stride, inside, 0).to(tl.float32)
    d = tl.load(at + 3 * stride, inside, 0).to(tl.float32)
    e = tl.load(at + 4 * stride, inside, 0).to(tl.float32)
    f = tl.load(at + 5 * stride, inside, 0).to(tl.float32)
    g = tl.load(at + 6 * stride, inside, 0).to(tl.float32)
    h = tl.load(at + 7 * stride, inside, 0).to(tl.float32)
    i = tl.load(at + 8 * stride, inside, 0).to(tl.float32)
    return a, b, c, d, e, f, g, h, i


@triton.jit
def _silu(x):
    return x / (1 + tl.exp(-x))
