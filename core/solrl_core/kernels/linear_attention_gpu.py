"""Triton kernel of linear attention and its launcher. Imported only on a GPU.

`solrl_core.kernels.linear_attention` documents the operation and holds the reference implementation in torch.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
# ruff: noqa: N803

import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from solrl_core.kernels.elements_gpu import halves, relu

_CHANNELS = 32
"""`HEAD_SIZES` of `solrl_core.kernels.linear_attention` divide it."""
_TOKENS = 64


def linear_attention(query: Tensor, key: Tensor, value: Tensor, out: Tensor, size: int) -> None:
    """Launch `linear_attention` for heads of `size` channels, writing to `out`; all tensors are contiguous."""
    batch, tokens, channels = out.shape
    wrap_triton(_linear_attention)[(triton.cdiv(channels, _CHANNELS), batch)](
        query,
        key,
        value,
        out,
        tokens,
        channels,
        SIZE=size,
        CHANNELS=_CHANNELS,
        TOKENS=_TOKENS,
        num_warps=4,
        num_stages=3,
    )


@triton.jit
def _linear_attention(
    query,
    key,
    value,
    out,
    tokens,
    channels,
    SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Process all tokens of CHANNELS neighbouring channels, which are whole heads, of one image.

    The products are over all these channels, because tensor cores work on no fewer; those of two different heads are
    dropped. The normaliser of each channel is a product with ones, so it needs no reduction.
    """
    image = tl.program_id(1).to(tl.int64) * tokens * channels
    i = tl.arange(0, CHANNELS)
    c = tl.program_id(0) * CHANNELS + i
    inside = (c < channels)[None, :]
    ones = tl.full((TOKENS, CHANNELS), 1, key.dtype.element_ty)
    sums = tl.zeros((CHANNELS, CHANNELS), tl.float32)
    norms = tl.zeros((CHANNELS, CHANNELS), tl.float32)
    key += image + c[None, :]
    value += image + c[None, :]
    for begin in range(0, tokens, TOKENS):
        token = (begin + tl.arange(0, TOKENS))[:, None]
        here = inside & (token < tokens)
        k = tl.trans(relu(tl.load(key + token * channels, here, 0)))
        v = tl.load(value + token * channels, here, 0)
        sums = tl.dot(k, v, sums)
        norms = tl.dot(k, ones, norms)
    same = (i[:, None] // SIZE) == (i[None, :] // SIZE)
    sums_high, sums_low = halves(tl.where(same, sums, 0), value.dtype.element_ty)
    norms_high, norms_low = halves(tl.where(same, norms, 0), value.dtype.element_ty)
    query += image + c[None, :]
    out += image + c[None, :]
    for begin in range(0, tokens, TOKENS):
        token = (begin + tl.arange(0, TOKENS))[:, None]
        here = inside & (token < tokens)
        q = relu(tl.load(query + token * channels, here, 0))
        top = tl.dot(q, sums_low)
        bottom = tl.dot(q, norms_low)
        top = tl.dot(q, sums_high, top)
        bottom = tl.dot(q, norms_high, bottom)
        tl.store(out + token * channels, (top / (bottom + 1e-15)).to(out.dtype.element_ty), here)
