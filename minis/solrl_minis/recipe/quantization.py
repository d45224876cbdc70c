"""Quantisation-aware fine-tuning of a trained miniature for NVFP4.

A model of three million parameters loses more accuracy at four bits than one with billions. The loss here pulls the
quantised velocity towards the model's full-precision velocity (with straight-through gradients for the rounding),
while the flow-matching loss keeps the full-precision velocity in place.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from solrl_core.precision import LayerPolicy, quantize_dequantize_per_candidate
from torch import nn
from torch.nn.utils import parametrize


class _Switch:
    on = False


def _rounding(device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """NVFP4 rounding with one scale per index of axis 0; compiled on a GPU if the compiled version agrees."""
    if device.type == "cuda":
        compiled: Callable[[torch.Tensor], torch.Tensor] = torch.compile(
            quantize_dequantize_per_candidate, dynamic=False
        )
        sample = torch.randn(4, 16, 192, device=device)
        try:
            torch._dynamo.config.recompile_limit = 64  # one per shape
            plain = quantize_dequantize_per_candidate(sample)
            if (compiled(sample) - plain).abs().mean() < 1e-2 * plain.abs().mean():
                return compiled
            print("compiled rounding gives different values; continuing without torch.compile", flush=True)
        except Exception as error:
            print(f"rounding does not compile ({error}); continuing without torch.compile", flush=True)
    return quantize_dequantize_per_candidate


class _FakeQuantWeight(nn.Module):
    def __init__(self, switch: _Switch, round_: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._switch = switch
        self._round = round_

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        if not self._switch.on:
            return weight
        rounded = self._round(weight.detach().flatten(1)[None]).view(weight.shape)
        return weight + (rounded - weight).detach()


@contextmanager
def quantizable(transformer: nn.Module, policy: LayerPolicy) -> Iterator[_Switch]:
    """Within the block, `switch.on = True` enables NVFP4 rounding in the layers that `policy` selects."""
    switch = _Switch()
    round_ = _rounding(next(transformer.parameters()).device)
    hooks = []

    def quantize_input(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        if not switch.on:
            return None
        x = inputs[0].float()
        channels_first = isinstance(module, nn.Conv2d)
        rows = x.movedim(1, -1) if channels_first else x
        rounded = round_(rows.detach().contiguous())
        rounded = rounded.movedim(-1, 1) if channels_first else rounded
        return (x + (rounded - x).detach(), *inputs[1:])

    layers = [transformer.get_submodule(name) for name in policy.select(transformer)]
    for layer in layers:
        parametrize.register_parametrization(layer, "weight", _FakeQuantWeight(switch, round_))
        hooks.append(layer.register_forward_pre_hook(quantize_input))
    try:
        yield switch
    finally:
        switch.on = False
        for hook in hooks:
            hook.remove()
        for layer in layers:
            parametrize.remove_parametrizations(layer, "weight")
