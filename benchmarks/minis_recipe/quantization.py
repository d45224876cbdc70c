"""Quantisation-aware fine-tuning of a trained miniature for NVFP4.

A model of three million parameters loses more accuracy at four bits than one with billions. The loss here pulls the
quantised velocity towards the model's full-precision velocity (with straight-through gradients for the rounding),
while the flow-matching loss keeps the full-precision velocity in place.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from solrl_core.precision.layer_policy import LayerPolicy
from solrl_core.precision.nvfp4 import quantize_dequantize_per_candidate
from torch import nn
from torch.nn.utils import parametrize


class _Switch:
    on = False


class _FakeQuantWeight(nn.Module):
    def __init__(self, switch: _Switch) -> None:
        super().__init__()
        self._switch = switch

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        if not self._switch.on:
            return weight
        rounded = quantize_dequantize_per_candidate(weight.detach().flatten(1)[None]).view(weight.shape)
        return weight + (rounded - weight).detach()


@contextmanager
def quantizable(transformer: nn.Module, policy: LayerPolicy) -> Iterator[_Switch]:
    """Within the block, `switch.on = True` enables NVFP4 rounding in the layers that `policy` selects."""
    switch = _Switch()
    hooks = []

    def quantize_input(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        if not switch.on:
            return None
        x = inputs[0].float()
        channels_first = isinstance(module, nn.Conv2d)
        rows = x.movedim(1, -1) if channels_first else x
        rounded = quantize_dequantize_per_candidate(rows.detach().contiguous())
        rounded = rounded.movedim(-1, 1) if channels_first else rounded
        return (x + (rounded - x).detach(), *inputs[1:])

    layers = [transformer.get_submodule(name) for name in policy.select(transformer)]
    for layer in layers:
        parametrize.register_parametrization(layer, "weight", _FakeQuantWeight(switch))
        hooks.append(layer.register_forward_pre_hook(quantize_input))
    try:
        yield switch
    finally:
        switch.on = False
        for hook in hooks:
            hook.remove()
        for layer in layers:
            parametrize.remove_parametrizations(layer, "weight")
