"""Emulated NVFP4 whose blocks take the better of two scales, which the product does not have.

The largest value of a block becomes 6 or 4, the two largest of E2M1, whichever changes the block less.
Source: Transformer Engine's NVFP4BlockScaling with nvfp4_4over6="all".
"""

import torch
import torch.nn.functional as F
from solrl_core.families import Backbone
from solrl_core.precision.layers import QuantLinear, QuantPointwiseConv
from solrl_core.precision.nvfp4 import BLOCK, E2M1_MAX, _round_to_e2m1_
from solrl_core.sampling.generator import Generator
from torch import Tensor

_SCALE_MAX = 256.0
"""Largest scale of a block whose largest value becomes 6. E4M3 then also holds 6/4 of it."""


class _FourOverSix:
    weight: Tensor
    bias: Tensor | None

    def _write(self, weight: Tensor) -> None:
        self.weight.copy_(rounded(weight.flatten(1)[None]).view_as(self.weight))

    def _linear(self, x: Tensor) -> Tensor:
        return F.linear(rounded(x), self.weight.flatten(1), self.bias)


class _Linear(_FourOverSix, QuantLinear):
    pass


class _PointwiseConv(_FourOverSix, QuantPointwiseConv):
    pass


def four_over_six(backbone: Backbone) -> Generator:
    """A generator of the base at NVFP4 with the better of two scales for each block of weights and activations."""
    generator = Generator(backbone, "nvfp4")
    for name, layer in list(generator.transformer.named_modules()):
        if isinstance(layer, QuantLinear | QuantPointwiseConv):
            layer.__class__ = _Linear if isinstance(layer, QuantLinear) else _PointwiseConv
            layer.refresh_(backbone.transformer.get_submodule(name).get_parameter("weight").detach().float())
    return generator


@torch.no_grad()
def rounded(x: Tensor) -> Tensor:
    """`x` [B, ..., length] rounded to NVFP4 in float32, with one float32 scale for each index of axis 0."""
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True)
    encode = E2M1_MAX * _SCALE_MAX / largest.amax(tuple(range(1, blocks.ndim)), keepdim=True)
    encode = encode.clamp(max=torch.finfo(torch.float32).max)
    found = []
    for top in (E2M1_MAX, 4.0):
        step = (largest * encode / top).to(torch.float8_e4m3fn).float() / encode
        codes = torch.where(step > 0, blocks / step, 0.0)
        found.append(_round_to_e2m1_(codes, torch.empty_like(codes)) * step)
    six, four = found
    better = (four - blocks).abs().sum(-1, keepdim=True) < (six - blocks).abs().sum(-1, keepdim=True)
    return torch.where(better, four, six).flatten(-2)
