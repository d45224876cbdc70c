"""A remedy for outliers that the product does not have: static scales of channels, taken from inputs into weights.

Source: SmoothQuant, arXiv 2211.10438, with α = 0.5.
"""

from collections.abc import Callable

import torch
from solrl_core.families.pipeline import PipelineBackbone
from solrl_core.precision import QuantLinear, QuantPointwiseConv
from solrl_core.sampling.generator import Generator
from torch import Tensor, nn

_PROMPT = "a green square above a red circle"
_SEEDS = range(100, 108)
_STEPS = 6
_LEAST = 1e-6


def scale_channels(generator: Generator, backbone: PipelineBackbone) -> None:
    """Divide the inputs of a generator's quantised layers by scales that a pass in BF16 gives; weights take them up."""
    exact = Generator(backbone, "bf16")
    largest: dict[str, Tensor] = {}
    layers = {
        name: layer
        for name, layer in generator.transformer.named_modules()
        if isinstance(layer, QuantLinear | QuantPointwiseConv)
    }
    handles = [
        exact.transformer.get_submodule(name).register_forward_pre_hook(_watch(largest, name)) for name in layers
    ]
    exact.generate(_PROMPT, _SEEDS, steps=_STEPS)
    for handle in handles:
        handle.remove()
    for name, layer in layers.items():
        weight = backbone.transformer.get_submodule(name).get_parameter("weight").detach().float()
        columns = weight.flatten(1).abs().amax(0)
        scales = (largest[name].clamp(min=_LEAST) / columns.clamp(min=_LEAST)).sqrt()
        scales /= scales.log().mean().exp()
        layer.refresh_((weight.flatten(1) * scales).view_as(weight))
        shape = (-1, 1, 1) if weight.ndim == 4 else (-1,)
        layer.register_forward_pre_hook(_divide(scales.view(shape)))


def _divide(by: Tensor) -> Callable[[nn.Module, tuple[Tensor]], tuple[Tensor]]:
    return lambda _, given: (given[0] / by,)


def _watch(largest: dict[str, Tensor], name: str) -> Callable[[nn.Module, tuple[Tensor]], None]:
    """A hook that remembers the largest magnitude of each channel of a layer's input."""

    def hook(layer: nn.Module, given: tuple[Tensor]) -> None:
        rows = given[0].movedim(1, -1) if isinstance(layer, nn.Conv2d) else given[0]
        found = rows.abs().flatten(0, -2).amax(0)
        largest[name] = torch.maximum(largest[name], found) if name in largest else found

    return hook
