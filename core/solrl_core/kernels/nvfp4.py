"""Triton kernels of NVFP4 rounding and their launcher.

One kernel rounds. For longer rows another one first finds the largest magnitude of each.

`solrl_core.precision.nvfp4` documents the operation and holds the reference implementation in torch, whose bits the
kernels give: the same float32 operations in the same order, each rounded on its own.
"""

import torch
from torch import Tensor

from solrl_core.kernels.operation import tl, triton

_BLOCK = 16
_PIECE = 2048
_WHOLE = 8192
"""Longest row that one program holds; longer ones are read twice, by several programs."""


def round_rows(x: Tensor, out: Tensor) -> None:
    """Round `x` [B, K] to NVFP4 with one float32 scale per row and write the values to `out` [B, K], float32.

    Both are contiguous, and K is a multiple of 16.
    """
    count, length = x.shape
    one_piece = length <= _WHOLE
    piece = max(_BLOCK, triton.next_power_of_2(length)) if one_piece else _PIECE
    pieces = triton.cdiv(length, piece)
    largest = torch.zeros(0 if one_piece else count, dtype=torch.int32, device=x.device)
    with torch.cuda.device_of(x):
        if not one_piece:
            _largest[(count * pieces,)](x, largest, length, pieces, PIECE=piece)
        # A fused multiply-add would round the sum of `_nearest` once instead of twice.
        _round[(count * pieces,)](x, out, largest, length, pieces, PIECE=piece, WHOLE=one_piece, enable_fp_fusion=False)


@triton.jit
def _largest(x, largest, length, pieces, PIECE: tl.constexpr):
    """Largest magnitude of each row, as the bits of a float32: their order is that of the numbers, with NaN last."""
    # One axis: a grid's other axes have at most 65,535 programs.
    row = (tl.program_id(0) // pieces).to(tl.int64)
    at = tl.program_id(0) % pieces * PIECE + tl.arange(0, PIECE)
    v = tl.load(x + row * length + at, at < length, 0).to(tl.float32)
    tl.atomic_max(largest + row, tl.max(_magnitude_bits(v), 0))


@triton.jit
def _round(x, out, largest, length, pieces, PIECE: tl.constexpr, WHOLE: tl.constexpr):
    """Round one piece of a row; `largest` is unused if the piece is the WHOLE row. 448 is E4M3's largest number."""
    row = (tl.program_id(0) // pieces).to(tl.int64)
    at = tl.program_id(0) % pieces * PIECE + tl.arange(0, PIECE)
    v = tl.load(x + row * length + at, at < length, 0).to(tl.float32)
    blocks = tl.reshape(v, (PIECE // 16, 16))
    block_bits = tl.max(_magnitude_bits(blocks), 1, keep_dims=True)
    row_bits = tl.max(tl.max(block_bits, 0), 0) if WHOLE else tl.load(largest + row)
    amax = row_bits.to(tl.float32, bitcast=True)
    encode = _at_most(tl.div_rn(2688.0, amax), 3.4028234663852886e38)
    decode = tl.where(amax == 0, 0.0, tl.div_rn(1.0, encode))
    block_scale = _at_most(block_bits.to(tl.float32, bitcast=True) * (encode * (1 / 6)), 448.0)
    block_scale = _nearest(block_scale, 0x3C800000, 0x43800000, 0x0A400000)  # E4M3
    step = block_scale * decode
    inverse = tl.where(step == 0, 0.0, _at_most(tl.div_rn(1.0, step), 3.4028234663852886e38))
    codes = _nearest(blocks * inverse, 0x3F800000, 0x40800000, 0x0B400000)  # E2M1
    codes = tl.maximum(_at_most(codes, 6.0), -6.0, propagate_nan=tl.PropagateNan.ALL)
    rounded = codes * block_scale * decode
    tl.store(out + row * length + at, tl.reshape(rounded, (PIECE,)), at < length)


@triton.jit
def _magnitude_bits(v):
    return v.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _at_most(v, limit):
    return tl.minimum(v, limit, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _nearest(v, lowest, highest, to_constant):
    """Round to the nearest number of a small format by float32's own rounding, as `_round_to_e2m1_` does.

    The format's spacing grows between two powers of two; `lowest` and `highest` are their bits.
    `to_constant` added to the bits of 2**e gives 1.5 · 2**(e + k), whose spacing is the format's at 2**e.
    """
    bits = v.to(tl.int32, bitcast=True) & 0x7F800000
    constant = (tl.minimum(tl.maximum(bits, lowest), highest) + to_constant).to(tl.float32, bitcast=True)
    return v + constant - constant
