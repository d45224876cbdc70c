"""Linear attention over several scales, as in the autoencoder of SANA."""

import torch
from torch import Tensor

from solrl_core.kernels.elements import halves, relu
from solrl_core.kernels.linear_attention import plain_linear_attention
from solrl_core.kernels.operation import operation, tl, triton

HEAD_SIZE = 32
"""Head size that the kernel supports."""
_TOKENS = 64
_PROGRAMS = 640
"""Most programs, by splitting a head's tokens: about this number runs at once, five on each of 132 multiprocessors."""
_MOST_SPLITS = 16


def _out(qkv: Tensor, scaled: list[Tensor], weights: list[Tensor]) -> Tensor:
    return qkv.new_empty(*qkv.shape[:2], (1 + len(scaled)) * qkv.shape[-1] // 3)


def plain_multiscale_attention(qkv: Tensor, scaled: list[Tensor], weights: list[Tensor]) -> Tensor:
    size = weights[0].shape[-1]
    projected = [_projected(x, weight) for x, weight in zip(scaled, weights, strict=True)]
    heads = torch.cat([qkv, *projected], -1).view(*qkv.shape[:2], -1, 3, size)
    query, key, value = (part.flatten(2) for part in heads.unbind(-2))
    return plain_linear_attention(query, key, value, heads.shape[2]).contiguous()


def _projected(x: Tensor, weight: Tensor) -> Tensor:
    groups = x.reshape(*x.shape[:2], len(weight), -1)
    return torch.einsum("bsgi,goi->bsgo", groups, weight).flatten(2)


@operation("multiscale_attention", plain_multiscale_attention, outputs=_out)
def multiscale_attention(qkv: Tensor, scaled: list[Tensor], weights: list[Tensor]) -> Tensor:
    """Project the scales, then attend as `linear_attention` does, in each head of each scale.

    A head's query, key and value are neighbouring groups of channels. Each group of a scale has its own projection.
    The kernels project while they attend, so no projected tensor is stored.

    Args:
        qkv: [B, S, 3·C], the first scale, which is not projected.
        scaled: the further scales, [B, S, 3·C] each.
        weights: their projections, [groups, size, size] each, out before in; `size` channels are a group.

    Returns:
        [B, S, scales·C], contiguous, in `qkv`'s dtype. Projections are rounded to it; sums are in float32, and rounded
        to 16 bits of mantissa by the kernel, which is for BF16 and `HEAD_SIZE`. Not differentiable.
    """
    fits = qkv.dtype == torch.bfloat16 and all(weight.shape[-1] == HEAD_SIZE for weight in weights)
    if not weights or not fits:
        return plain_multiscale_attention(qkv, scaled, weights)
    out = _out(qkv, scaled, weights)
    parts = out.chunk(1 + len(scaled), -1)
    for x, weight, part in zip((qkv, *scaled), (None, *weights), parts, strict=True):
        _attend_scale(x.contiguous(), None if weight is None else weight.contiguous(), part)
    return out


def _attend_scale(x: Tensor, weight: Tensor | None, out: Tensor) -> None:
    """Attend in the heads of one scale `x` [B, S, 3·C], writing to `out` [B, S, C], whose rows may be far apart.

    With `weight` [groups, size, size], the groups are projected. `x` and `weight` are contiguous.
    """
    batch, tokens, channels = out.shape
    heads = channels // HEAD_SIZE
    target_splits = min(_MOST_SPLITS, max(1, _PROGRAMS // (batch * heads)), triton.cdiv(tokens, 2 * _TOKENS))
    per_split = triton.cdiv(triton.cdiv(tokens, target_splits), _TOKENS) * _TOKENS
    splits = triton.cdiv(tokens, per_split)
    sums = torch.empty(batch, heads, splits, HEAD_SIZE + 1, HEAD_SIZE, dtype=torch.float32, device=x.device)
    grid = (heads, splits, batch)
    sizes = {"SIZE": HEAD_SIZE, "TOKENS": _TOKENS, "PROJECT": weight is not None, "num_warps": 4, "num_stages": 3}
    projection = x if weight is None else weight
    _sum[grid](x, projection, sums, tokens, per_split, **sizes)
    _attend[grid](x, projection, sums, out, tokens, per_split, out.stride(0), out.stride(1), SPLITS=splits, **sizes)


@triton.jit
def _sum(x, weight, sums, tokens, per_split, SIZE: tl.constexpr, TOKENS: tl.constexpr, PROJECT: tl.constexpr):
    """Sum relu(key)ᵀ · value and relu(key) over `per_split` tokens of one head.

    The sums of the keys are a product with ones, so they need no reduction.
    """
    head = tl.program_id(0)
    split = tl.program_id(1)
    image = tl.program_id(2).to(tl.int64)
    channels = tl.num_programs(0) * 3 * SIZE
    i = tl.arange(0, SIZE)
    key_weight = _weight(weight, head * 3 + 1, SIZE, PROJECT)
    value_weight = _weight(weight, head * 3 + 2, SIZE, PROJECT)
    ones = tl.full((TOKENS, SIZE), 1, tl.float32).to(x.dtype.element_ty)
    products = tl.zeros((SIZE, SIZE), tl.float32)
    norms = tl.zeros((SIZE, SIZE), tl.float32)
    x += image * tokens * channels + head * 3 * SIZE + i[None, :]
    for begin in range(split * per_split, tl.minimum(tokens, (split + 1) * per_split), TOKENS):
        token = (begin + tl.arange(0, TOKENS))[:, None]
        at = x + token.to(tl.int64) * channels
        key = tl.trans(relu(_project(tl.load(at + SIZE, token < tokens, 0), key_weight, PROJECT)))
        value = _project(tl.load(at + 2 * SIZE, token < tokens, 0), value_weight, PROJECT)
        products = tl.dot(key, value, products)
        norms = tl.dot(key, ones, norms)
    sums += ((image * tl.num_programs(0) + head) * tl.num_programs(1) + split) * (SIZE + 1) * SIZE
    tl.store(sums + i[:, None] * SIZE + i[None, :], products)
    # The columns of `norms` are equal, and the mean of 32 equal numbers is exact.
    tl.store(sums + SIZE * SIZE + i, tl.sum(norms, 1) / SIZE)


@triton.jit
def _attend(
    x,
    weight,
    sums,
    out,
    tokens,
    per_split,
    image_stride,
    token_stride,
    SPLITS: tl.constexpr,
    SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    PROJECT: tl.constexpr,
):
    """Attend with `per_split` queries of one head."""
    head = tl.program_id(0)
    split = tl.program_id(1)
    image = tl.program_id(2).to(tl.int64)
    channels = tl.num_programs(0) * 3 * SIZE
    i = tl.arange(0, SIZE)
    query_weight = _weight(weight, head * 3, SIZE, PROJECT)
    products = tl.zeros((SIZE, SIZE), tl.float32)
    norms = tl.zeros((SIZE, SIZE), tl.float32)
    sums += (image * tl.num_programs(0) + head) * SPLITS * (SIZE + 1) * SIZE
    for part in tl.static_range(SPLITS):
        at = sums + part * (SIZE + 1) * SIZE
        products += tl.load(at + i[:, None] * SIZE + i[None, :])
        norms += tl.load(at + SIZE * SIZE + i)[:, None]
    products_high, products_low = halves(products, x.dtype.element_ty)
    norms_high, norms_low = halves(norms, x.dtype.element_ty)
    x += image * tokens * channels + head * 3 * SIZE + i[None, :]
    out += image * image_stride + head * SIZE + i[None, :]
    for begin in range(split * per_split, tl.minimum(tokens, (split + 1) * per_split), TOKENS):
        token = (begin + tl.arange(0, TOKENS))[:, None]
        here = token < tokens
        query = relu(_project(tl.load(x + token.to(tl.int64) * channels, here, 0), query_weight, PROJECT))
        top = tl.dot(query, products_low)
        bottom = tl.dot(query, norms_low)
        top = tl.dot(query, products_high, top)
        bottom = tl.dot(query, norms_high, bottom)
        attended = (top / (bottom + 1e-15)).to(out.dtype.element_ty)
        tl.store(out + token.to(tl.int64) * token_stride, attended, here)


@triton.jit
def _weight(weight, group, SIZE: tl.constexpr, PROJECT: tl.constexpr):
    """The projection of one group, in before out."""
    i = tl.arange(0, SIZE)
    if PROJECT:
        return tl.load(weight + group * SIZE * SIZE + i[None, :] * SIZE + i[:, None])
    else:
        return i


@triton.jit
def _project(x, weight, PROJECT: tl.constexpr):
    if PROJECT:
        return tl.dot(x, weight).to(x.dtype)
    else:
        return x
