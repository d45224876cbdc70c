"""Operations at the models' shapes: inputs, the product's kernel, the plain arithmetic and the candidate's settings."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from solrl_core import kernels
from solrl_core.kernels import gpu
from torch import Tensor

from kernel_sweep import attention, depthwise, linear_attention, modulate, plain

Inputs = tuple[Any, ...]
EPS = 1e-6


class Case(NamedTuple):
    """One operation at one shape.

    Attributes:
        name: operation and shape.
        inputs: makes inputs on the GPU; those of `odd` fill no block of the kernel.
        product: the operation as the product computes it on a GPU.
        reference: the first image's result in float32.
        candidate: the operation with one of `settings`.
        tolerance: largest relative error, ‖result − reference‖ / ‖reference‖. Rounding to BF16 alone gives 0.0017.
    """

    name: str
    inputs: Callable[[], Inputs]
    odd: Callable[[], Inputs]
    product: Callable[..., Any]
    reference: Callable[..., Any]
    candidate: Callable[..., Any]
    settings: Sequence[Mapping[str, int]]
    tolerance: float


def cases() -> Iterator[Case]:
    """All cases, with SANA and FLUX.1 in batches of 24 and SD3.5-Large in batches of 8."""
    for batch in (24, 6):
        yield Case(
            f"linear attention of SANA, batch {batch}",
            lambda batch=batch: (*random(batch, 1024, 2240, count=3), 70),
            lambda: (*random(2, 100, 96, count=3), 3),
            _product_linear_attention,
            lambda q, k, v, heads: plain.linear_attention(*wide(q, k, v), heads),
            linear_attention.linear_attention,
            linear_attention.SETTINGS,
            0.0025,
        )
    yield Case(
        "depthwise of SANA's feed-forward, batch 24",
        lambda: _depthwise_inputs(24, 32, 32, 5600),
        lambda: _depthwise_inputs(2, 5, 7, 40),
        _product_depthwise,
        lambda x, taps, bias: kernels.silu_depthwise_glu(wide(x)[0], taps.mT.unflatten(1, (1, 3, 3)).cpu(), bias.cpu()),
        depthwise.silu_depthwise_glu,
        depthwise.SETTINGS,
        0.0025,
    )
    yield Case(
        "attention of SD3.5-Large, batch 8",
        lambda: random(8, 4301, 38, 64, count=3),
        lambda: (*random(2, 130, 3, 64), *random(2, 203, 3, 64, count=2)),
        kernels.attend,
        lambda *qkv: plain.bounded_attention(*(x[:1].float() for x in qkv)),
        attention.bounded_attention,
        attention.SETTINGS,
        0.004,
    )
    for model, batch, tokens, length in (
        ("SD3.5-Large", 8, 4096, 2432),
        ("SANA", 24, 1024, 2240),
        ("FLUX.1", 24, 1024, 3072),
    ):
        for name, count in (("norm_modulate_quantize", 1), ("add_norm_modulate_quantize", 2)):
            operation = getattr(kernels, name)
            yield Case(
                f"{name.replace('_', ' ')} of {model}, batch {batch}",
                partial(_modulate_inputs, batch, tokens, length, count),
                partial(_modulate_inputs, 2, 37, 328, count),
                lambda *inputs, operation=operation: operation(*inputs, EPS),
                lambda *inputs, operation=operation: operation(*first(*inputs), EPS),
                lambda *inputs, name=name: getattr(modulate, name)(*inputs[:-1], EPS, inputs[-1]),
                modulate.SETTINGS,
                0.004,
            )


def random(*shape: int, count: int = 1) -> tuple[Tensor, ...]:
    """Standard normal numbers in BF16, on the GPU."""
    return tuple(torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(count))


def first(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The first image's part of tensors, on the CPU, where the product's operations run in plain torch."""
    return tuple(x[:1].cpu() for x in tensors)


def wide(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The first image's part of tensors, in float32 on the CPU."""
    return tuple(x.float() for x in first(*tensors))


def values(result: Any) -> list[Tensor]:
    """Numbers of an operation's result: E4M3 codes [B, S, C] are multiplied by their scales [B, S, 1] after them."""
    tensors = [result] if isinstance(result, Tensor) else list(result)
    if len(tensors) == 1:
        return [tensors[0].float()]
    *others, codes, scales = tensors
    return [*(x.float() for x in others), codes.float() * scales]


def error(result: Any, reference: Any) -> float:
    """Largest relative error of the first image's result."""
    pairs = zip(values(result), values(reference), strict=True)
    return max(float((x[:1].cpu() - y.cpu()).norm() / y.norm()) for x, y in pairs)


def _product_linear_attention(query: Tensor, key: Tensor, value: Tensor, heads: int) -> Tensor:
    out: Tensor = _compiled()(query, key, value, heads)
    return out


@cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(plain.linear_attention, dynamic=False)


def _depthwise_inputs(batch: int, height: int, width: int, channels: int) -> Inputs:
    (x,), (taps,), (bias,) = random(batch, height, width, 2 * channels), random(9, 2 * channels), random(2 * channels)
    return x, taps * 0.3, bias


def _product_depthwise(x: Tensor, taps: Tensor, bias: Tensor) -> Tensor:
    out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    gpu.silu_depthwise_glu(x, taps, bias, out)
    return out


def _modulate_inputs(batch: int, tokens: int, length: int, count: int) -> Inputs:
    """`count` tensors [batch, tokens, length], then as many slices of a modulation as the operation takes."""
    slices = random(batch, 6 * length)[0].chunk(6, 1)
    return *random(batch, tokens, length, count=count), *slices[3 : 4 + count]
