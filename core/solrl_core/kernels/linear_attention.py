"""Linear attention with ReLU as feature map, as in SANA."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import wrap_triton

from solrl_core.kernels.elements import halves, relu
from solrl_core.kernels.operation import operation, tl, triton

HEAD_SIZES = (8, 16, 32)
"""Head sizes that the kernel supports; they divide `_CHANNELS`."""
_CHANNELS = 32
_TOKENS = 64


def plain_linear_attention(query: Tensor, key: Tensor, value: Tensor, heads: int) -> Tensor:
    """`linear_attention` in torch's operations, differentiable."""
    dtype, (batch, tokens, _) = query.dtype, query.shape
    query, key, value = (x.mT.reshape(batch, heads, -1, tokens) for x in (query, key, value))
    ones = F.pad(value.float(), (0, 0, 0, 1), value=1.0)  # gives the normaliser
    sums = ones @ F.relu(key).float().mT @ F.relu(query).float()
    attended = sums[:, :, :-1] / (sums[:, :, -1:] + 1e-15)
    return attended.flatten(1, 2).mT.to(dtype)


@operation("linear_attention", plain_linear_attention)
def linear_attention(query: Tensor, key: Tensor, value: Tensor, heads: int) -> Tensor:
    """relu(query) · Σ relu(key)ᵀ · value / (relu(query) · Σ relu(key)ᵀ) for each head; the sums are over the tokens.

    The kernel is for BF16 and heads of `HEAD_SIZES`. It rounds the sums to 16 bits of mantissa.

    Args:
        query, key, value: [B, S, C], float; C channels of all heads.
        heads: number of heads; divides C.

    Returns:
        [B, S, C] in `query`'s dtype, accumulated in float32. Not differentiable: `plain_linear_attention` is.

    Source: Katharopoulos et al., arXiv 2006.16236.
    """
    size = query.shape[-1] // heads
    if query.dtype != torch.bfloat16 or size not in HEAD_SIZES:
        return plain_linear_attention(query, key, value, heads)
    query = query.contiguous()
    out = torch.empty_like(query)
    batch, tokens, channels = out.shape
    wrap_triton(_linear_attention)[(triton.cdiv(channels, _CHANNELS), batch)](
        query,
        key.contiguous(),
        value.contiguous(),
        out,
        tokens,
        channels,
        SIZE=size,
        CHANNELS=_CHANNELS,
        TOKENS=_TOKENS,
        num_warps=4,
        num_stages=3,
    )
    return out


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

    The products are over all these channels, because tensor cores work on no fewer; products of two different heads are
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
    diagonal = (i[:, None] // SIZE) == (i[None, :] // SIZE)
    sums_high, sums_low = halves(tl.where(diagonal, sums, 0), value.dtype.element_ty)
    norms_high, norms_low = halves(tl.where(diagonal, norms, 0), value.dtype.element_ty)
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
