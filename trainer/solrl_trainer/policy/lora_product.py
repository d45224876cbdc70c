"""Fused product of LoRA layers that share an input, in the precision of the base weights.

All layers of a group are one operation: the input is read once for all adapters, and each adapter's product is added
to its layer's in place. Compilers see one operator with a registered gradient.

Source: Hu et al., arXiv 2106.09685.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("solrl::lora_product", mutates_args=())
def lora_product(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], a: list[Tensor], b: list[Tensor], scale: float
) -> list[Tensor]:
    """Compute x·Wᵀ + bias + scale · (x·Aᵀ)·Bᵀ for each layer.

    Args:
        x: [M, K], of the weights' dtype.
        weights: each [N, K].
        biases: each [N]; empty for layers without bias.
        a: each [R, K], float32.
        b: each [N, R], float32.
        scale: alpha / rank.

    Returns:
        The product [M, N] of each layer; then x·Aᵀ of all layers, [M, layers · R], for the backward pass.
    """
    low_a, low_b = _rounded(a, b, x.dtype)
    inner = x @ low_a.T
    rank = a[0].shape[0]
    outputs = []
    for i, (weight, u) in enumerate(zip(weights, torch.split(inner, rank, 1), strict=True)):
        out = torch.addmm(biases[i], x, weight.T) if biases else x @ weight.T
        outputs.append(out.addmm_(u, low_b[i].T, alpha=scale))
    return [*outputs, inner]


@lora_product.register_fake
def _(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], a: list[Tensor], b: list[Tensor], scale: float
) -> list[Tensor]:
    rows = x.shape[0]
    return [*(x.new_empty(rows, weight.shape[0]) for weight in weights), x.new_empty(rows, len(a) * a[0].shape[0])]


@torch.library.custom_op("solrl::lora_product_backward", mutates_args=())
def lora_product_backward(
    gradients: list[Tensor],
    x: Tensor,
    inner: Tensor,
    weights: list[Tensor],
    a: list[Tensor],
    b: list[Tensor],
    scale: float,
    input_too: bool,
) -> list[Tensor]:
    """Gradients of each A, then of each B, in float32; if `input_too`, finally that of x in its dtype."""
    low_a, low_b = _rounded(a, b, x.dtype)
    rank = a[0].shape[0]
    through_b = torch.empty_like(inner)
    of_b = []
    for gradient, weight, through, u in zip(
        gradients, low_b, torch.split(through_b, rank, 1), torch.split(inner, rank, 1), strict=True
    ):
        torch.mm(gradient, weight, out=through)
        of_b.append(_sum_of_outer(gradient, u).mul_(scale))
    of_a = [part.clone() for part in torch.split(_sum_of_outer(through_b, x).mul_(scale), rank)]
    if not input_too:
        return [*of_a, *of_b]
    of_x = gradients[0] @ weights[0]
    for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
        of_x.addmm_(gradient, weight)
    of_x.addmm_(through_b, low_a, alpha=scale)
    return [*of_a, *of_b, of_x]


@lora_product_backward.register_fake
def _(
    gradients: list[Tensor],
    x: Tensor,
    inner: Tensor,
    weights: list[Tensor],
    a: list[Tensor],
    b: list[Tensor],
    scale: float,
    input_too: bool,
) -> list[Tensor]:
    of_adapters = [torch.empty_like(weight) for weight in (*a, *b)]
    return [*of_adapters, torch.empty_like(x)] if input_too else of_adapters


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weights, biases, a, b, scale = inputs
    ctx.save_for_backward(x, output[-1], *weights, *a, *b)
    ctx.count, ctx.scale, ctx.biases = len(weights), scale, len(biases)


def _backward(ctx: Any, gradients: Sequence[Tensor]) -> tuple[Any, ...]:
    x, inner, *tensors = ctx.saved_tensors
    count = ctx.count
    weights, a, b = tensors[:count], tensors[count : 2 * count], tensors[2 * count :]
    outer = [gradient.contiguous() for gradient in gradients[:-1]]
    input_too: bool = ctx.needs_input_grad[0]
    results = lora_product_backward(outer, x, inner, weights, a, b, ctx.scale, input_too)
    nothing: list[None] = [None] * count
    of_x = results[-1] if input_too else None
    return of_x, nothing, [None] * ctx.biases, results[:count], results[count : 2 * count], None


lora_product.register_autograd(_backward, setup_context=_keep_for_backward)


def _rounded(a: Sequence[Tensor], b: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """The adapters rounded to `dtype`: all A in one tensor [layers · R, K], and a list of B."""
    rank = a[0].shape[0]
    low_a = a[0].new_empty(len(a) * rank, a[0].shape[1], dtype=dtype)
    low_b = [weight.new_empty(weight.shape, dtype=dtype) for weight in b]
    torch._foreach_copy_([*torch.split(low_a, rank), *low_b], [*a, *b])
    return low_a, low_b


def _sum_of_outer(x: Tensor, y: Tensor) -> Tensor:
    """xᵀ · y, accumulated and returned in float32."""
    if x.device.type == "cuda":
        product: Tensor = torch.mm(x.T, y, out_dtype=torch.float32)
        return product
    return x.T.float() @ y.float()
