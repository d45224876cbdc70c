"""Triton kernel of attention without a running maximum and its launcher. Imported only on a GPU.

`solrl_core.kernels.bounded_attention` documents the operation and holds the reference implementation in torch.
"""

# mypy: disable-error-code="untyped-decorator,no-untyped-def,no-untyped-call"
# ruff: noqa: N803

import math

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

_QUERIES = 128
_KEYS = 64


def bounded_attention(query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
    """Launch `bounded_attention`, writing to `out`; all tensors are contiguous."""
    batch, queries, heads, size = query.shape

    def blocks(x: Tensor, rows: int) -> TensorDescriptor:
        # Three axes, so that a block beyond the last token holds zeros and not the next image's tokens.
        return TensorDescriptor.from_tensor(x.flatten(2), [1, rows, size])

    _bounded_attention[(triton.cdiv(queries, _QUERIES), heads, batch)](
        blocks(query, _QUERIES),
        blocks(key, _KEYS),
        blocks(value, _KEYS),
        blocks(out, _QUERIES),
        key.shape[1],
        math.log2(math.e) / math.sqrt(size),
        SIZE=size,
        QUERIES=_QUERIES,
        KEYS=_KEYS,
        num_warps=8,
        num_stages=4,
    )


@triton.jit
def _bounded_attention(
    query,
    key,
    value,
    out,
    keys,
    scale,
    SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Process QUERIES queries of one head. Powers are of 2, so `scale` includes log2 e."""
    image = tl.program_id(2)
    channel = tl.program_id(1) * SIZE
    row = tl.program_id(0) * QUERIES
    q = tl.reshape(query.load([image, row, channel]), (QUERIES, SIZE))
    total = tl.zeros((QUERIES,), tl.float32)
    sums = tl.zeros((QUERIES, SIZE), tl.float32)
    whole = keys // KEYS * KEYS
    for begin in range(0, whole, KEYS):
        k = tl.reshape(key.load([image, begin, channel]), (KEYS, SIZE))
        powers = tl.exp2(tl.dot(q, tl.trans(k)) * scale)
        total += tl.sum(powers, 1)
        v = tl.reshape(value.load([image, begin, channel]), (KEYS, SIZE))
        sums = tl.dot(powers.to(v.dtype), v, sums)
    if whole < keys:
        k = tl.reshape(key.load([image, whole, channel]), (KEYS, SIZE))
        powers = tl.exp2(tl.dot(q, tl.trans(k)) * scale)
        powers = tl.where(tl.arange(0, KEYS)[None, :] < keys - whole, powers, 0)
        total += tl.sum(powers, 1)
        v = tl.reshape(value.load([image, whole, channel]), (KEYS, SIZE))
        sums = tl.dot(powers.to(v.dtype), v, sums)
    result = (sums / total[:, None]).to(q.dtype)
    out.store([image, row, channel], tl.reshape(result, (1, QUERIES, SIZE)))
