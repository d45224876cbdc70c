"""Differentiable softmax attention with the fastest kernel that is correct on this GPU.

On Hopper, cuDNN's kernels are about 1.7 times as fast as flash attention, but in torch 2.11 their gradients are wrong
for some memory layouts. This module therefore fixes the layouts and checks each kernel against float32 before its
first use.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from solrl_core.kernels.bounded_attention import HEAD_SIZES, bounded_attention

_TOLERANCE = 0.02
"""Largest accepted relative error against float32; BF16 kernels have 0.002 to 0.003."""
_COMPARED_HEADS = 2


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *, bounded: bool = False) -> Tensor:
    """softmax(query · keyᵀ / √D + mask) · value, for each head.

    Without gradient mode, torch chooses the kernel, unless the logits are bounded.

    Args:
        query: [B, S, H, D].
        key, value: [B, T, H, D].
        mask: [B, 1, 1, T], added to the logits; not differentiated.
        bounded: whether queries and keys have norms that `are_bounded`.

    Returns:
        [B, S, H, D].
    """
    if torch.is_grad_enabled():
        out: Tensor = _attention(query, key, value, mask)[0]
        return out
    if bounded and mask is None and query.dtype == torch.bfloat16 and query.shape[-1] in HEAD_SIZES:
        return bounded_attention(query, key, value)
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2)


class _Kernel(NamedTuple):
    """Forward and backward pass; all tensors [B, H, S or T, D], logsumexp float32 [B, H, S]."""

    forward: Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


@torch.library.custom_op("solrl::attention", mutates_args=())
def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The output [B, S, H, D] and the logarithm of each softmax's sum, float32 [B, H, S]."""
    dense_query, dense_key, dense_value = (x.contiguous().transpose(1, 2) for x in (query, key, value))
    out, logsumexp = _kernel_for(query, key, mask).forward(dense_query, dense_key, dense_value, mask)
    return out.transpose(1, 2).contiguous(), logsumexp.contiguous()


@_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    batch, tokens, heads, _ = query.shape
    return query.new_empty(query.shape), query.new_empty(batch, heads, tokens, dtype=torch.float32)


@torch.library.custom_op("solrl::attention_backward", mutates_args=())
def _attention_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, out: Tensor, logsumexp: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, in their shapes."""
    dense = [x.contiguous().transpose(1, 2) for x in (gradient, query, key, value, out)]
    gradients = _kernel_for(query, key, mask).backward(*dense, logsumexp, mask)
    of_query, of_key, of_value = (x.transpose(1, 2).contiguous() for x in gradients)
    return of_query, of_key, of_value


@_attention_backward.register_fake
def _(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, out: Tensor, logsumexp: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _keep_for_backward(ctx: Any, inputs: tuple[Tensor | None, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _backward(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    query, key, value, mask, out, logsumexp = ctx.saved_tensors
    return *_attention_backward(gradient, query, key, value, mask, out, logsumexp), None


_attention.register_autograd(_backward, setup_context=_keep_for_backward)


def _kernel_for(query: Tensor, key: Tensor, mask: Tensor | None) -> _Kernel:
    return _KERNELS[kernel_name(query.device, query.dtype, query.shape, key.shape[1], mask is not None)]


@cache
def kernel_name(device: torch.device, dtype: torch.dtype, shape: torch.Size, keys: int, masked: bool) -> str:
    """Name of the fastest correct kernel for queries of this shape [B, S, H, D], tried on random numbers.

    Raises:
        RuntimeError: no kernel is correct.
    """
    if device.type != "cuda" or dtype == torch.float32:
        return "plain"
    errors = []
    for name in ("cudnn", "efficient") if masked else ("cudnn", "flash", "efficient"):
        try:
            worst = max(_error(_KERNELS[name], device, dtype, shape, keys, masked, shifted) for shifted in (0.0, -3.0))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            errors.append(f"{name}: {str(error).splitlines()[0]}")
            continue
        if worst < _TOLERANCE:
            return name
        errors.append(f"{name}: relative error {worst:.3f}")
    raise RuntimeError(
        f"no attention kernel computes correct gradients for queries {tuple(shape)} and {keys} keys of {dtype} on "
        f"{torch.cuda.get_device_name(device)}; tried {'; '.join(errors)}"
    )


def _error(
    kernel: _Kernel,
    device: torch.device,
    dtype: torch.dtype,
    shape: torch.Size,
    keys: int,
    masked: bool,
    shifted: float,
) -> float:
    """Largest relative error of output and gradients against float32; infinite if any value is not finite.

    Args:
        shifted: offset that moves all logits away from zero. The query's gradient is then a small difference of large
            numbers, mostly rounding error in BF16, and only has to be finite.
    """
    batch, tokens, heads, size = shape
    generator = torch.Generator(device).manual_seed(0)

    def random(count: int, around: Tensor | float = 0.0) -> Tensor:
        x = torch.randn(batch, count, heads, size, device=device, generator=generator)
        return (x * (0.1 if shifted else 1.0) + around).to(dtype).transpose(1, 2)

    far = torch.randn(size, device=device, generator=generator).abs()
    query, key = random(tokens, 3 * far if shifted else 0.0), random(keys, shifted * far)
    value, gradient = random(keys), random(tokens)
    mask = None
    if masked:
        mask = torch.zeros(batch, 1, 1, keys, dtype=dtype, device=device)
        mask[..., keys // 2 :] = -10000.0
    out, logsumexp = kernel.forward(query, key, value, mask)
    results = [out, *kernel.backward(gradient, query, key, value, out, logsumexp, mask)]
    if not all(bool(x.isfinite().all()) for x in results):
        return float("inf")
    g, q, k, v = (x[:1, :_COMPARED_HEADS].float() for x in (gradient, query, key, value))
    small_mask = None if mask is None else mask[:1].float()
    true_out, true_logsumexp = _plain_forward(q, k, v, small_mask)
    true = [true_out, *_plain_backward(g, q, k, v, true_out, true_logsumexp, small_mask)]
    skipped = {1} if shifted else set()
    return max(
        float((x[:1, :_COMPARED_HEADS].float() - y).norm() / y.norm())
        for i, (x, y) in enumerate(zip(results, true, strict=True))
        if i not in skipped
    )


def _plain_forward(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    logits = _logits(query, key, mask)
    logsumexp = logits.logsumexp(-1)
    return ((logits - logsumexp[..., None]).exp() @ value.float()).to(query.dtype), logsumexp


def _plain_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    wide = gradient.float()
    weights = (_logits(query, key, mask) - logsumexp[..., None]).exp()
    along = (wide * out.float()).sum(-1, keepdim=True)
    of_logits = weights * (wide @ value.float().mT - along) * query.shape[-1] ** -0.5
    of_query, of_key = of_logits @ key.float(), of_logits.mT @ query.float()
    return of_query.to(query.dtype), of_key.to(key.dtype), (weights.mT @ wide).to(value.dtype)


def _logits(query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
    logits: Tensor = query.float() @ key.float().mT * query.shape[-1] ** -0.5
    return logits if mask is None else logits + mask.float()


def _cudnn_forward(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    bias = None if mask is None else mask.expand(-1, query.shape[1], -1, -1)
    out, logsumexp, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(query, key, value, bias, True)
    return out, logsumexp.view(query.shape[:-1])


def _cudnn_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    bias = None if mask is None else mask.expand(-1, query.shape[1], -1, -1)
    unused = [query.new_empty((), dtype=torch.int64) for _ in range(2)]  # random state of dropout
    lengths = query.shape[2], key.shape[2]
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        gradient, query, key, value, out, logsumexp[..., None], *unused, bias, None, None, *lengths, 0.0, False
    )
    return gradients


def _flash_forward(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    out, logsumexp, *_ = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)
    return out, logsumexp


def _flash_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    unused = [query.new_empty(2, dtype=torch.uint64), query.new_empty(0, dtype=torch.uint64)]
    lengths = query.shape[2], key.shape[2]
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        gradient, query, key, value, out, logsumexp, None, None, *lengths, 0.0, False, *unused
    )
    return gradients


_LOGSUMEXP_MULTIPLE = 32


def _efficient_forward(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    bias = _aligned(mask, query)
    out, logsumexp, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, bias, True)
    return out, logsumexp[..., : query.shape[2]]


def _efficient_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    padded = F.pad(logsumexp, (0, -query.shape[2] % _LOGSUMEXP_MULTIPLE), value=float("inf"))
    unused = [query.new_empty((), dtype=torch.int64) for _ in range(2)]
    of_query, of_key, of_value, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        gradient, query, key, value, _aligned(mask, query), out, padded, *unused, 0.0, [True, True, True, False]
    )
    return of_query, of_key, of_value


def _aligned(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """The mask expanded to all heads and queries, [B, H, S, T], with strides that are multiples of 16 elements."""
    if mask is None:
        return None
    keys = mask.shape[-1]
    return F.pad(mask, (0, -keys % 16)).expand(-1, query.shape[1], query.shape[2], -1)[..., :keys]


_KERNELS = {
    "cudnn": _Kernel(_cudnn_forward, _cudnn_backward),
    "flash": _Kernel(_flash_forward, _flash_backward),
    "efficient": _Kernel(_efficient_forward, _efficient_backward),
    "plain": _Kernel(_plain_forward, _plain_backward),
}
