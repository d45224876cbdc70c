"""Triton kernel of a softmax over long rows and its launcher. Imported only on a GPU.

`solrl_core.kernels.wide_attention` documents the operation that uses it.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
# ruff: noqa: N803

import math

import triton
import triton.language as tl
from torch import Tensor


def softmax(logits: Tensor, scale: float, out: Tensor) -> None:
    """Write softmax(scale · logits) over the last axis to `out`; both are contiguous, `logits` is float32."""
    length = logits.shape[-1]
    block = triton.next_power_of_2(length)
    warps = min(16, max(4, block // 2048))
    _softmax[(logits.numel() // length,)](logits, out, scale * math.log2(math.e), length, BLOCK=block, num_warps=warps)


@triton.jit
def _softmax(logits, out, scale, length, BLOCK: tl.constexpr):
    """One row, held in registers. Powers are of 2, so `scale` includes log2 e."""
    row = tl.program_id(0).to(tl.int64) * length
    at = tl.arange(0, BLOCK)
    x = tl.load(logits + row + at, at < length, float("-inf")) * scale
    powers = tl.exp2(x - tl.max(x, 0))
    tl.store(out + row + at, (powers / tl.sum(powers, 0)).to(out.dtype.element_ty), at < length)
