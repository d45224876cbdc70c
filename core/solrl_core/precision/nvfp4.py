"""NVFP4 emulation: float32 tensors rounded to exactly the values that the 4-bit format can represent.

Blocks of 16 along the last axis share one E4M3 scale. One float32 scale covers the whole tensor or, if the caller
passes ``amax``, each part of it. The float32 operations run in Transformer Engine's order: another order of the same
arithmetic flips up to 0.1 % of the codes.
"""

import torch
from torch import Tensor

from solrl_core.kernels.nvfp4 import round_rows
from solrl_core.kernels.rows import E4M3_MAX

BLOCK = 16
E2M1_MAX = 6.0

_FLOAT32_MAX = torch.finfo(torch.float32).max
_EXPONENT_MASK = 0x7F800000
_BITS_OF_ONE = 0x3F800000
_BITS_OF_FOUR = 0x40800000
# Added to the bits of 2**e, this gives 1.5 * 2**(e + 22): a float32 whose spacing is 2**(e - 1), as in E2M1.
_TO_ROUNDING_CONSTANT = (22 << 23) | 0x400000


def quantize_dequantize(x: Tensor, *, amax: Tensor | None = None) -> Tensor:
    """Round ``x`` to the nearest NVFP4 values (ties to even) and return them in float32, in ``x``'s shape.

    x: any floating-point dtype, ``[..., length]`` with length a multiple of 16 (else ValueError).
    amax: the largest magnitude that each float32 scale must hold, broadcastable to ``x`` with a last axis of 1,
    such as ``[B, 1, 1]`` for one scale per candidate. None: one scale for the whole tensor.

    Every zero comes back as +0. Blocks below the scale's range become zeros, and so does everything whose ``amax``
    is 0. A NaN makes its block NaN; an amax that is NaN or infinite makes everything that shares its scale NaN.
    With a finite ``amax`` from the caller, larger values saturate, Inf included. There is no gradient.
    Source: Transformer Engine's NVFP4BlockScaling, 1×16 blocks, no Hadamard transform or stochastic rounding.
    """
    if amax is not None and amax.ndim and amax.shape[-1] != 1:
        raise ValueError(f"amax needs a last axis of 1: got shape {tuple(amax.shape)} for x {tuple(x.shape)}")
    return quantize_dequantize_per_candidate(x.unsqueeze(0)).squeeze(0) if amax is None else _rounded(x, amax)


def quantize_dequantize_per_candidate(x: Tensor) -> Tensor:
    """``quantize_dequantize`` with one float32 scale per index of axis 0 (``x`` [B, ..., length]).

    A candidate's values then do not depend on the rest of its batch. A 1-D ``x`` is one candidate.
    On a GPU, kernels give the same bits as the 30 operations here.
    """
    if not x.is_cuda:
        return _rounded(x, None)
    _require_blocks(x)
    values = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    rows = (x.shape[0] if x.ndim > 1 else 1, -1)
    round_rows(x.contiguous().view(rows), values.view(rows))
    return values


@torch.library.custom_op("solrl::nvfp4_per_candidate", mutates_args=())
def opaque_per_candidate(x: Tensor) -> Tensor:
    """``quantize_dequantize_per_candidate``, opaque to torch.compile: fusion would change how its additions round."""
    return quantize_dequantize_per_candidate(x).contiguous()


@opaque_per_candidate.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=torch.float32, device=x.device)


@torch.no_grad()
def _rounded(x: Tensor, amax: Tensor | None) -> Tensor:
    """``x`` rounded under these float32 scales; None: one for each index of axis 0."""
    _require_blocks(x)
    blocks = x.to(torch.float32).view(*x.shape[:-1], -1, BLOCK)
    scratch = torch.abs(blocks)
    block_amax = _block_amax_(scratch)
    if amax is None:
        tensor_amax = block_amax.amax(tuple(range(1 if x.ndim > 1 else 0, blocks.ndim)), keepdim=True)
    else:
        tensor_amax = amax.to(x.device, torch.float32).unsqueeze(-1)
    return _round_blocks(blocks, block_amax, tensor_amax, scratch).flatten(-2)


def _require_blocks(x: Tensor) -> None:
    if x.ndim == 0 or x.shape[-1] % BLOCK or x.numel() == 0 or not x.is_floating_point():
        raise ValueError(
            f"NVFP4 needs a last axis that is a multiple of {BLOCK} in a non-empty floating-point tensor: "
            f"got shape {tuple(x.shape)}, {x.dtype}; expected [..., k·{BLOCK}]"
        )


def _block_amax_(magnitudes: Tensor) -> Tensor:
    """Maximum of each block, ``[..., 1]``, in ``magnitudes``' storage. Halving is faster than amax(-1) on a CPU."""
    width = BLOCK
    while width > 1:
        width //= 2
        low, high = magnitudes[..., :width], magnitudes[..., width : 2 * width]
        torch.maximum(low, high, out=low)
    return magnitudes[..., :1]


def _round_blocks(blocks: Tensor, block_amax: Tensor, tensor_amax: Tensor, scratch: Tensor) -> Tensor:
    """Quantise and dequantise ``blocks`` [..., 16]; overwrites ``scratch``, which may alias ``block_amax``."""
    # Torch computes number / tensor as number · reciprocal, which rounds twice.
    encode = (torch.full_like(tensor_amax, E2M1_MAX * E4M3_MAX) / tensor_amax).clamp_(max=_FLOAT32_MAX)
    decode = encode.reciprocal().masked_fill_(tensor_amax == 0, 0)

    # Clip before the cast: on overflow it gives NaN in some versions of torch and saturates in other versions.
    block_scale = (block_amax * (encode * (1 / 6))).clamp_(max=E4M3_MAX)
    block_scale = block_scale.to(torch.float8_e4m3fn).to(torch.float32)
    step = block_scale * decode
    codes = blocks * step.reciprocal().clamp_(max=_FLOAT32_MAX).masked_fill_(step == 0, 0)
    return _round_to_e2m1_(codes, scratch).mul_(block_scale).mul_(decode)


def _round_to_e2m1_(y: Tensor, scratch: Tensor) -> Tensor:
    """Round ``y`` in place to E2M1, nearest with ties to even, saturating at ±6; NaN stays NaN.

    Adds and subtracts a constant whose float32 spacing equals E2M1's at that magnitude, so that the processor's
    adder does the rounding. About 9 times as fast as a chain of ``torch.where``.
    """
    bits = scratch.view(torch.int32)
    torch.bitwise_and(y.view(torch.int32), _EXPONENT_MASK, out=bits)
    # Below 1 the grid stays at 0.5, and above 4 at 2.
    bits.clamp_(min=_BITS_OF_ONE, max=_BITS_OF_FOUR).add_(_TO_ROUNDING_CONSTANT)
    return y.add_(scratch).sub_(scratch).clamp_(-E2M1_MAX, E2M1_MAX)
