"""Attention whose two products are in FP8, for sequences so long that attention takes most of a pass: clips.

Each block of queries and of keys has its own scale, and each head one for its values, as in SageAttention 2 (Zhang et
al., arXiv 2411.10958), which has INT8 queries and keys.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from solrl_core.kernels.operation import TensorDescriptor, has_descriptors, like_first, operation, tl, triton
from solrl_core.kernels.rows import E4M3_MAX, TINY

HEAD_SIZES = (64, 128)
"""Head sizes that the kernel supports."""
QUERIES, KEYS = 64, 128
"""Tokens that share a scale."""
WEIGHT = 256.0
"""Code of a query's largest weight, before the softmax's division."""


def has_fp8_attention(device: torch.device, size: int) -> bool:
    """Whether `fp8_attention` runs on a device for heads of this size."""
    return device.type != "cuda" or (has_descriptors(device) and size in HEAD_SIZES)


def plain_fp8_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    wide_query, wide_key, wide_value = (x.float().transpose(1, 2) for x in (query, key, value))
    logits = _rounded(wide_query, QUERIES) @ _rounded(wide_key, KEYS).mT / math.sqrt(query.shape[-1])
    powers = (logits - logits.amax(-1, keepdim=True)).exp() * WEIGHT
    weights = powers.to(torch.float8_e4m3fn).float()
    attended: Tensor = weights @ _rounded(wide_value, value.shape[1]) / powers.sum(-1, keepdim=True)
    return attended.transpose(1, 2).to(query.dtype).contiguous()


def _rounded(x: Tensor, tokens: int) -> Tensor:
    """x [B, H, S, D] as E4M3 holds it, with one scale for each head's next `tokens`."""
    count = x.shape[2]
    blocks = F.pad(x, (0, 0, 0, -count % tokens)).reshape(*x.shape[:2], -1, tokens, x.shape[3])
    scale = (blocks.abs().amax((-2, -1), keepdim=True) / E4M3_MAX).clamp_min(TINY)
    rounded: Tensor = (blocks / scale).to(torch.float8_e4m3fn).float() * scale
    return rounded.flatten(2, 3)[:, :, :count]


@operation("fp8_attention", plain_fp8_attention, outputs=like_first)
def fp8_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """softmax(query · keyᵀ / √D) · value for each head; queries, keys, values and weights are rounded to E4M3.

    Args:
        query: [B, S, H, D]; on a GPU in BF16, with D one of `HEAD_SIZES`.
        key, value: [B, T, H, D].

    Returns:
        [B, S, H, D] in `query`'s dtype. Not differentiable.
    """
    batch, count, heads, size = query.shape
    tokens = key.shape[1]
    out = like_first(query)
    query_codes, query_scales = _quantized(query.contiguous(), QUERIES)
    key_codes, key_scales = _quantized(key.contiguous(), KEYS)
    value = value.contiguous()
    # The second product needs the codes of the values along the keys, whole blocks of them.
    value_scales = (torch.linalg.vector_norm(value, math.inf, dim=(1, 3)).float() / E4M3_MAX).clamp_min_(TINY)
    value_blocks = triton.cdiv(tokens, KEYS)
    value_codes = value.new_empty((batch, heads * size, value_blocks * KEYS), dtype=torch.float8_e4m3fn)
    _transposed_codes[(value_blocks, heads, batch)](
        value, value_codes, value_scales, tokens, HEADS=heads, SIZE=size, TOKENS=KEYS
    )

    def blocks(x: Tensor, block: list[int]) -> Any:
        # Three axes, so that a block beyond the last token holds zeros and not the next clip's tokens.
        return TensorDescriptor.from_tensor(x, [1, *block])

    _fp8_attention[(triton.cdiv(count, QUERIES), heads, batch)](
        blocks(query_codes, [QUERIES, size]),
        blocks(key_codes, [KEYS, size]),
        blocks(value_codes, [size, KEYS]),
        blocks(out.flatten(2), [QUERIES, size]),
        query_scales,
        key_scales,
        value_scales,
        tokens,
        math.log2(math.e) / math.sqrt(size),
        HEADS=heads,
        SIZE=size,
        QUERIES=QUERIES,
        KEYS=KEYS,
        SHIFT=math.log2(WEIGHT),
        num_warps=4,
        num_stages=3,
    )
    return out


def _quantized(x: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Codes [B, S, H · D] of x [B, S, H, D], and the scale of each block of tokens, float32 [B, H, blocks]."""
    batch, count, heads, size = x.shape
    blocks = triton.cdiv(count, tokens)
    codes = x.new_empty((batch, count, heads * size), dtype=torch.float8_e4m3fn)
    scales = x.new_empty((batch, heads, blocks), dtype=torch.float32)
    _block_codes[(blocks, heads, batch)](x, codes, scales, count, HEADS=heads, SIZE=size, TOKENS=tokens)
    return codes, scales


@triton.jit
def _tokens(x, count, HEADS: tl.constexpr, SIZE: tl.constexpr, TOKENS: tl.constexpr):
    """The program's block of x [B, S, H, D] in float32, zero beyond the last token, with its offsets and mask."""
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    first = (tl.program_id(2).to(tl.int64) * count + row) * HEADS + tl.program_id(1)
    at = first[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    inside = row[:, None] < count
    return tl.load(x + at, inside, 0).to(tl.float32), at, inside


@triton.jit
def _block_codes(x, codes, scales, count, HEADS: tl.constexpr, SIZE: tl.constexpr, TOKENS: tl.constexpr):
    """Quantise a block of tokens of one head with one scale; 448 is `E4M3_MAX`, the other constant `TINY`."""
    block, at, inside = _tokens(x, count, HEADS, SIZE, TOKENS)
    scale = tl.maximum(tl.max(tl.abs(block)) / 448, 1.1754943508222875e-38)
    pair = tl.program_id(2) * HEADS + tl.program_id(1)
    tl.store(scales + pair * tl.num_programs(0) + tl.program_id(0), scale)
    tl.store(codes + at, (block / scale).to(tl.float8e4nv), inside)


@triton.jit
def _transposed_codes(x, codes, scales, count, HEADS: tl.constexpr, SIZE: tl.constexpr, TOKENS: tl.constexpr):
    """Quantise a block of tokens of one head with the head's scale, and write it as [D, S]."""
    block, _, _ = _tokens(x, count, HEADS, SIZE, TOKENS)
    pair = tl.program_id(2) * HEADS + tl.program_id(1)
    scale = tl.load(scales + pair)
    channel = pair.to(tl.int64) * SIZE + tl.arange(0, SIZE)
    column = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    to = channel[:, None] * (tl.num_programs(0) * TOKENS) + column[None, :]
    tl.store(codes + to, tl.trans((block / scale).to(tl.float8e4nv)))


@triton.jit
def _fp8_attention(
    query,
    key,
    value,
    out,
    query_scales,
    key_scales,
    value_scales,
    keys,
    scale,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """Process QUERIES queries of one head. Powers are of 2, so `scale` includes log2 e."""
    clip = tl.program_id(2)
    channel = tl.program_id(1) * SIZE
    row = tl.program_id(0) * QUERIES
    pair = clip * HEADS + tl.program_id(1)
    q = tl.reshape(query.load([clip, row, channel]), (QUERIES, SIZE))
    scale *= tl.load(query_scales + pair * tl.num_programs(0) + tl.program_id(0))
    key_scales += pair * tl.cdiv(keys, KEYS)
    largest = tl.full((QUERIES,), -1e30, tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    sums = tl.zeros((QUERIES, SIZE), tl.float32)
    full_keys = keys // KEYS * KEYS
    for begin in range(0, full_keys, KEYS):
        k = tl.reshape(key.load([clip, begin, channel]), (KEYS, SIZE))
        v = tl.reshape(value.load([clip, channel, begin]), (SIZE, KEYS))
        logits = tl.dot(q, tl.trans(k))
        by = scale * tl.load(key_scales + begin // KEYS)
        largest, total, sums = _added(logits, by, v, largest, total, sums, SHIFT)
    if full_keys < keys:
        k = tl.reshape(key.load([clip, full_keys, channel]), (KEYS, SIZE))
        v = tl.reshape(value.load([clip, channel, full_keys]), (SIZE, KEYS))
        logits = tl.where(tl.arange(0, KEYS)[None, :] < keys - full_keys, tl.dot(q, tl.trans(k)), -float("inf"))
        by = scale * tl.load(key_scales + full_keys // KEYS)
        largest, total, sums = _added(logits, by, v, largest, total, sums, SHIFT)
    result = sums / total[:, None] * tl.load(value_scales + pair)
    out.store([clip, row, channel], tl.reshape(result.to(tl.bfloat16), (1, QUERIES, SIZE)))


@triton.jit
def _added(logits, by, v, largest, total, sums, SHIFT: tl.constexpr):
    """The largest logit, the sum of the weights and that of the weighted values, with one more block of keys."""
    larger = tl.maximum(largest, tl.max(logits, 1) * by)
    powers = tl.exp2(logits * by - (larger - SHIFT)[:, None])
    rescale = tl.exp2(largest - larger)
    total = total * rescale + tl.sum(powers, 1)
    return larger, total, tl.dot(powers.to(tl.float8e4nv), tl.trans(v), sums * rescale[:, None])
