"""Candidate for SANA's linear attention: one kernel with BF16 products, in place of torch's float32 products.

For compute capability 10.0, Triton 3.6 compiles only the settings of 32 channels; for others its pipeliner fails.
"""

# ruff: noqa: N803

from collections.abc import Mapping

import triton
import triton.language as tl
from torch import Tensor

SETTINGS = [
    {"CHANNELS": 64, "TOKENS": 64, "num_warps": 4, "num_stages": 3},
    {"CHANNELS": 64, "TOKENS": 64, "num_warps": 4, "num_stages": 2},
    {"CHANNELS": 64, "TOKENS": 128, "num_warps": 4, "num_stages": 2},
    {"CHANNELS": 64, "TOKENS": 128, "num_warps": 4, "num_stages": 3},
    {"CHANNELS": 64, "TOKENS": 128, "num_warps": 8, "num_stages": 2},
    {"CHANNELS": 32, "TOKENS": 64, "num_warps": 4, "num_stages": 3},
    {"CHANNELS": 32, "TOKENS": 128, "num_warps": 4, "num_stages": 2},
]


def linear_attention(query: Tensor, key: Tensor, value: Tensor, heads: int, setting: Mapping[str, int]) -> Tensor:
    """The operation of `kernel_sweep.plain`, with the sums over the tokens rounded to 16 bits of mantissa.

    Args:
        query, key, value: [B, S, C], whose last axes are contiguous.
        heads: number of heads; CHANNELS of the setting is a multiple of a head's size.
        setting: one of `SETTINGS`.
    """
    batch, tokens, channels = query.shape
    out = query.new_empty(query.shape)
    strides = [stride for x in (query, key, value, out) for stride in x.stride()[:2]]
    grid = (triton.cdiv(channels, setting["CHANNELS"]), batch)
    _linear_attention[grid](query, key, value, out, tokens, channels, *strides, SIZE=channels // heads, **setting)
    return out


@triton.jit
def _linear_attention(
    query,
    key,
    value,
    out,
    tokens,
    channels,
    query_outer,
    query_inner,
    key_outer,
    key_inner,
    value_outer,
    value_inner,
    out_outer,
    out_inner,
    SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Process all tokens of CHANNELS neighbouring channels, which are whole heads, of one image.

    The products are over all these channels, because tensor cores work on no fewer; those of two different heads are
    dropped. The normaliser of each channel is a product with ones, so it needs no reduction.
    """
    image = tl.program_id(1).to(tl.int64)
    i = tl.arange(0, CHANNELS)
    c = tl.program_id(0) * CHANNELS + i
    inside = (c < channels)[None, :]
    ones = tl.full((TOKENS, CHANNELS), 1, key.dtype.element_ty)
    sums = tl.zeros((CHANNELS, CHANNELS), tl.float32)
    norms = tl.zeros((CHANNELS, CHANNELS), tl.float32)
    key += image * key_outer + c[None, :]
    value += image * value_outer + c[None, :]
    for begin in range(0, tokens, TOKENS):
        token = (begin + tl.arange(0, TOKENS))[:, None]
        here = inside & (token < tokens)
        k = tl.trans(_relu(tl.load(key + token * key_inner, here, 0)))
        v = tl.load(value + token * value_inner, here, 0)
        sums = tl.dot(k, v, sums)
        norms = tl.dot(k, ones, norms)
    same = (i[:, None] // SIZE) == (i[None, :] // SIZE)
    sums_high, sums_low = _halves(tl.where(same, sums, 0), value.dtype.element_ty)
    norms_high, norms_low = _halves(tl.where(same, norms, 0), value.dtype.element_ty)
    query += image * query_outer + c[None, :]
    out += image * out_outer + c[None, :]
    for begin in range(0, tokens, TOKENS):
        token = (begin + tl.arange(0, TOKENS))[:, None]
        here = inside & (token < tokens)
        q = _relu(tl.load(query + token * query_inner, here, 0))
        top = tl.dot(q, sums_low)
        bottom = tl.dot(q, norms_low)
        top = tl.dot(q, sums_high, top)
        bottom = tl.dot(q, norms_high, bottom)
        tl.store(out + token * out_inner, (top / (bottom + 1e-15)).to(out.dtype.element_ty), here)


@triton.jit
def _relu(x):
    # Keeps NaN, like torch's.
    return tl.where(x < 0, 0, x)


@triton.jit
def _halves(x, dtype: tl.constexpr):
    """Two numbers of 8 bits each whose sum has 16: tensor cores multiply no wider ones."""
    high = x.to(dtype)
    return high, (x - high.to(tl.float32)).to(dtype)
