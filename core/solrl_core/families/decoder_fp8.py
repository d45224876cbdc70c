"""FP8 decoders: the 3×3 convolutions between a decoder's first and its last compute in E4M3.

They are for images that are only scored. Convolutions take most of the time of a decoder with fused modules, and FP8
units take about 0.6 of their time in BF16. The rest of the decoder stays as it is.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from solrl_core.errors import DecoderError
from solrl_core.families.decoder_fused import (
    fused_decoder,
    is_plain_convolution,
    rounded_decoder,
    weight_sharing_copy,
)
from solrl_core.kernels.operation import has_descriptors
from solrl_core.kernels.rows import E4M3_MAX

MARGIN = 8
"""Inputs up to this many times the largest one seen when scales were measured are not clipped."""
_PARTS = ("up_blocks.", "mid_block.")
"""Parts of a decoder between its first and its last convolution."""


def fp8_decoder(vae: Any, decode: Callable[[Any], object]) -> nn.Module:
    """A copy of an autoencoder whose decoder computes in FP8; it shares all other weights. Not differentiable.

    Args:
        vae: the autoencoder.
        decode: decodes latents with an autoencoder. Its calls show the ranges of the convolutions' inputs.

    Raises:
        DecoderError: the decoder has no 3×3 convolutions of images.
    """
    scales = input_scales(vae, decode)
    if has_decoder_kernels(vae):
        return fused_decoder(vae, scales)
    return rounded_decoder(vae, scales)


def input_scales(vae: Any, decode: Callable[[Any], object]) -> dict[str, float]:
    """Scales of the inputs of a decoder's convolutions by their names: powers of two, from one decoding.

    E4M3 is a floating-point format: from its largest value down to 2⁻¹⁴ of it, a power of two as scale does not change
    the relative error.

    Raises:
        DecoderError: the decoder has no 3×3 convolutions of images.
    """
    copy = weight_sharing_copy(vae)  # other threads may decode with `vae` at the same time
    largest: dict[str, Tensor] = {}

    def note(name: str, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        largest[name] = inputs[0].abs().amax()

    for name, part in fp8_convolutions(copy).items():
        part.register_forward_pre_hook(partial(note, name))
    decode(copy)
    return {name: _scale(float(value)) for name, value in largest.items()}


def fp8_convolutions(vae: Any) -> dict[str, nn.Module]:
    """The convolutions that compute in FP8, by their names in the decoder.

    Raises:
        DecoderError: there are none.
    """
    named = getattr(vae, "decoder", nn.Identity()).named_modules()
    convolutions = {name: part for name, part in named if name.startswith(_PARTS) and is_plain_convolution(part)}
    if not convolutions or not decodes_images(vae):
        raise DecoderError(
            "no convolution of the decoder can compute in FP8",
            got=type(vae).__name__,
            expected="an autoencoder of images, with 3×3 convolutions in its decoder's blocks",
            action="omit decoder_precision",
        )
    return convolutions


def decodes_images(vae: nn.Module) -> bool:
    """Whether an autoencoder is of images, with four axes; one of videos has five."""
    return all(parameter.ndim < 5 for parameter in vae.parameters())


def has_decoder_kernels(vae: Any) -> bool:
    """Whether fused modules decode: from Hopper on, in BF16."""
    return bool(vae.dtype == torch.bfloat16 and has_descriptors(vae.device))


def _scale(largest: float) -> float:
    """The scale of inputs with this largest magnitude; 1 if the magnitude is 0 or not finite."""
    return 2.0 ** math.floor(math.log2(E4M3_MAX / (MARGIN * largest))) if 0 < largest < math.inf else 1.0
