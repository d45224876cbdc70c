"""Layer policy: selects and swaps the layers to quantise, and measures their share of a backbone's linear FLOPs."""

import copy
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from solrl_core.precision.fp8 import Fp8Linear, Fp8PointwiseConv
from solrl_core.precision.fp8_emulated import EmulatedFp8Linear, EmulatedFp8PointwiseConv
from solrl_core.precision.layers import QuantLinear, QuantPointwiseConv, is_pointwise
from solrl_core.precision.nvfp4 import BLOCK
from solrl_core.precision.te import TeLinear, TePointwiseConv, nvfp4_obstacle

_LAYERS: dict[str, tuple[type[QuantLinear], type[QuantPointwiseConv]]] = {
    "nvfp4": (TeLinear, TePointwiseConv),
    "nvfp4 emulated": (QuantLinear, QuantPointwiseConv),
    "fp8": (Fp8Linear, Fp8PointwiseConv),
    "fp8 emulated": (EmulatedFp8Linear, EmulatedFp8PointwiseConv),
}


@dataclass(frozen=True)
class LayerPolicy:
    """Regular expressions, searched in dotted module names, that select the layers to quantise.

    ``keep`` wins over ``quantize``. Layers whose larger dimension is at most ``keep_max_dim`` are kept, too.
    ValueError if a pattern is not a regular expression.
    """

    quantize: tuple[str, ...]
    keep: tuple[str, ...] = ()
    keep_max_dim: int = 0

    def __post_init__(self) -> None:
        for pattern in (*self.quantize, *self.keep):
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"layer pattern {pattern!r} is not a regular expression: {error}") from error

    def select(self, model: nn.Module) -> list[str]:
        """Names of the ``nn.Linear`` and 1×1 ``nn.Conv2d`` in ``model`` to quantise, in module order.

        ValueError if a pattern matches no such layer, if nothing is left to quantise, or if the in-features of a
        selected layer are not a multiple of 16.
        """
        dims = {
            name: _linear_dims(module)
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) or is_pointwise(module)
        }
        for pattern in (*self.quantize, *self.keep):
            if not _matches(dims, [pattern]):
                raise ValueError(
                    f"layer pattern {pattern!r} matches no linear layer of {type(model).__name__}; "
                    f"it has {_examples(list(dims))}"
                )
        excluded = _matches(dims, self.keep) | {name for name in dims if max(dims[name]) <= self.keep_max_dim}
        included = _matches(dims, self.quantize)
        selected = [name for name in dims if name in included - excluded]
        if included and not selected:
            raise ValueError(f"nothing is left to quantise in {type(model).__name__} under {self}")
        for name in selected:
            if dims[name][0] % BLOCK:
                raise ValueError(
                    f"layer {name!r} cannot be quantised: in-features {dims[name][0]}, "
                    f"expected a multiple of {BLOCK}; add it to keep"
                )
        return selected


def apply_policy(
    model: nn.Module, policy: LayerPolicy, precision: str = "nvfp4", device: torch.device | None = None
) -> list[str]:
    """Replace the layers that ``policy`` selects with quantised ones, in place; return their names.

    precision: "nvfp4" (native if the model's device supports it) or "fp8"; for tests and benchmarks also "nvfp4
    emulated" and "fp8 emulated". ValueError if the device or a layer's size does not support it.
    device: device of the quantised layers; by default the model's.
    """
    names = policy.select(model)
    device = device or next(model.parameters()).device
    if precision == "nvfp4" and names and nvfp4_obstacle(device) is not None:
        precision = "nvfp4 emulated"
    linear, pointwise = _LAYERS[precision]
    for name in names:
        module = _moved(model.get_submodule(name), device)
        parent, _, child = name.rpartition(".")
        if isinstance(module, nn.Conv2d):
            quantised: nn.Module = pointwise.from_conv(module)
        else:
            assert isinstance(module, nn.Linear)
            quantised = linear.from_linear(module)
        setattr(model.get_submodule(parent), child, quantised.train(module.training))
    return names


def _moved(layer: nn.Module, device: torch.device) -> nn.Module:
    """A copy of a layer with its weights on `device`; the weights of `layer` stay where they are."""
    moved = copy.copy(layer)
    moved._parameters = {
        name: weight if weight is None else nn.Parameter(weight.detach().to(device), requires_grad=False)
        for name, weight in layer._parameters.items()
    }
    return moved


def linear_flops(model: nn.Module, run: Callable[[], object]) -> dict[str, int]:
    """FLOPs (2 · rows · in · out) of each linear layer of ``model`` during ``run()``, by name.

    Covers ``nn.Linear``, 1×1 ``nn.Conv2d`` and the quantised layers; a layer that does not run counts 0. Calls
    ``run`` once, without gradients.
    """
    flops: dict[str, int] = {}
    handles = []

    def count(name: str) -> Callable[[nn.Module, tuple[object, ...], Tensor], None]:
        def hook(module: nn.Module, _: tuple[object, ...], output: Tensor) -> None:
            # rows · out is the output's size in any layout.
            flops[name] += 2 * output.numel() * _linear_dims(module)[0]

        return hook

    try:
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear | QuantLinear | QuantPointwiseConv) or is_pointwise(module):
                flops[name] = 0
                handles.append(module.register_forward_hook(count(name)))
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    return flops


def share_of_flops(flops: Mapping[str, int], names: Collection[str], blocks: Sequence[str]) -> float:
    """Share (0 to 1) of the ``flops`` (layer → FLOPs) under the modules ``blocks`` that the layers ``names`` spend.

    ValueError if no linear layer under ``blocks`` ran.
    """
    prefixes = tuple(f"{prefix}." for prefix in blocks)
    inside = {name: count for name, count in flops.items() if name.startswith(prefixes)}
    total = sum(inside.values())
    if total == 0:
        raise ValueError(f"no linear layer ran under {' or '.join(blocks)}; the model has {_examples(list(flops))}")
    return sum(count for name, count in inside.items() if name in names) / total


def _linear_dims(module: nn.Module) -> tuple[int, int]:
    """(in, out) of a linear layer or 1×1 convolution."""
    if isinstance(module, nn.Linear | QuantLinear):
        return module.in_features, module.out_features
    assert isinstance(module, nn.Conv2d | QuantPointwiseConv)
    return module.in_channels, module.out_channels


def _matches(names: dict[str, tuple[int, int]], patterns: Sequence[str]) -> set[str]:
    return {name for name in names if any(re.search(pattern, name) for pattern in patterns)}


def _examples(names: list[str]) -> str:
    if not names:
        return "no linear layers"
    spread = names[:: max(1, len(names) // 8)][:8]
    return f"{len(names)} linear layers, such as {', '.join(spread)}"
