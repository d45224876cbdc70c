"""Autoencoders that stop after an inner stage of their decoder.

A stage is one of the decoder's `up_blocks`: blocks at one resolution, with the upsampling before or after them.
"""

import base64
import copy

import numpy as np
import torch
import torch.nn.functional as F
from solrl_proto.rollouts import EarlyDecoder
from torch import nn

from solrl_core.device_events import upload
from solrl_core.errors import DecoderError

_LAST_NORMS = {"AutoencoderKL": "conv_norm_out", "AutoencoderKLFlux2": "conv_norm_out", "AutoencoderDC": "norm_out"}
"""diffusers' class → the norm before the decoder's last convolution."""
_RUNS_BACKWARDS = ("AutoencoderDC",)
"""Autoencoders whose last `up_blocks` run first."""


class EarlyDecoderError(DecoderError):
    """An early decoder does not fit the autoencoder."""


class RgbHead(nn.Module):
    """A convolution of 3×3 pixels from features [B, C, h, w] of any dtype to colours [B, 3, h, w], in float32."""

    def __init__(self, early: EarlyDecoder, device: torch.device) -> None:
        super().__init__()
        values = np.frombuffer(base64.b64decode(early.weights), "<f2").astype(np.float32).reshape(3, -1, 3, 3)
        self._weights = upload(torch.from_numpy(values), device)
        self._bias = upload(torch.tensor(early.bias), device)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Map each pixel's neighbourhood.

        Raises:
            EarlyDecoderError: the features have another number of channels.
        """
        channels = self._weights.shape[1]
        if features.shape[1] != channels:
            raise EarlyDecoderError(f"got an early decoder for {channels} channels; this stage has {features.shape[1]}")
        return F.conv2d(features.float(), self._weights, self._bias, padding=1)


def stage_count(vae: nn.Module) -> int:
    """Number of stages of an autoencoder's decoder.

    Raises:
        EarlyDecoderError: an autoencoder whose stages are not known.
    """
    kind = type(vae).__name__
    if kind not in _LAST_NORMS:
        raise EarlyDecoderError(f"got an autoencoder of class {kind}; early decoders are for {', '.join(_LAST_NORMS)}")
    return len(list(vae.get_submodule("decoder.up_blocks").children()))


def truncated(vae: nn.Module, stages: int, out: nn.Module) -> nn.Module:
    """An autoencoder whose decoder applies `out` after its first `stages` stages. Its blocks are those of `vae`.

    Raises:
        EarlyDecoderError: the decoder has fewer stages, or is of an unknown kind.
    """
    count, kind = stage_count(vae), type(vae).__name__
    if stages > count:
        raise EarlyDecoderError(f"got {stages} stages of the decoder; it has {count}")
    decoder = vae.get_submodule("decoder")
    blocks = list(decoder.get_submodule("up_blocks").children())
    first = blocks[count - stages :] if kind in _RUNS_BACKWARDS else blocks[:stages]
    parts = {"up_blocks": nn.ModuleList(first), _LAST_NORMS[kind]: nn.Identity(), "conv_act": nn.Identity()}
    return _with(vae, decoder=_with(decoder, **parts, conv_out=out))


def _with(module: nn.Module, **parts: nn.Module) -> nn.Module:
    """A copy of a module with some parts replaced; it shares the others, also if they are compiled."""
    own = copy.deepcopy(module, {id(part): part for part in module.children()})
    for name, part in parts.items():
        setattr(own, name, part)
    return own
