"""Emulated FP8 with one scale per tensor, which the product does not have: outliers show why."""

import torch
import torch.nn.functional as F
from solrl_core.families import Backbone
from solrl_core.kernels import E4M3_MAX, TINY
from solrl_core.precision.fp8_emulated import EmulatedFp8Linear, EmulatedFp8PointwiseConv
from solrl_core.sampling.generator import Generator
from solrl_engine.precision_check import generator_at
from torch import Tensor


class _ByTensor:
    weight: Tensor
    bias: Tensor | None

    def _write(self, weight: Tensor) -> None:
        self.weight.copy_(_rounded(weight))

    def _linear(self, x: Tensor) -> Tensor:
        return F.linear(_rounded(x), self.weight.flatten(1), self.bias).to(torch.bfloat16)


class _Linear(_ByTensor, EmulatedFp8Linear):
    pass


class _PointwiseConv(_ByTensor, EmulatedFp8PointwiseConv):
    pass


def by_tensor(backbone: Backbone) -> Generator:
    """A generator of the base in FP8 with one scale for each tensor of weights and of a batch's activations."""
    generator = generator_at(backbone, "fp8")
    for name, layer in list(generator.transformer.named_modules()):
        if isinstance(layer, EmulatedFp8Linear | EmulatedFp8PointwiseConv):
            layer.__class__ = _Linear if isinstance(layer, EmulatedFp8Linear) else _PointwiseConv
            layer.refresh_(backbone.transformer.get_submodule(name).get_parameter("weight").detach().float())
    return generator


def _rounded(values: Tensor) -> Tensor:
    values = values.detach().float()
    scale = (values.abs().amax() / E4M3_MAX).clamp(min=TINY)
    return (values / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float() * scale
