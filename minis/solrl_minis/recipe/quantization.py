"""Teaches a trained miniature to keep its course in NVFP4.

A model of three million parameters loses more to four bits than the billions it stands for. Here the quantised
forward pass is pulled towards the model's own full-precision velocity (gradients pass straight through the
rounding), while the flow-matching loss holds that velocity in place. Nothing but the weights changes.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.utils import parametrize

from solrl_core.precision import LayerPolicy, quantize_dequantize, quantize_dequantize_per_candidate


class _Switch:
    on = False


class _FakeQuantWeight(nn.Module):
    def __init__(self, switch: _Switch) -> None:
        super().__init__()
        self._switch = switch

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        if not self._switch.on:
            return weight
        rounded = quantize_dequantize(weight.flatten(1)).view(weight.shape)
        return weight + (rounded - weight).detach()


@contextmanager
def quantizable(transformer: nn.Module, policy: LayerPolicy) -> Iterator[_Switch]:
    """Within: `switch.on = True` makes the layers that `policy` selects compute with NVFP4 rounding."""
    switch = _Switch()
    hooks = []

    def quantize_input(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        if not switch.on:
            return None
        x = inputs[0].float()
        channels_first = isinstance(module, nn.Conv2d)
        rows = x.movedim(1, -1) if channels_first else x
        rounded = quantize_dequantize_per_candidate(rows)
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
