"""Description of a miniature backbone family. Each family defines one, in a separate module."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from solrl_core.families import Backbone, Conditioning
from solrl_core.families.load import FAMILIES
from solrl_core.model_options import ModelOptions

from minis_recipe import measure
from minis_recipe.data import Source, World

TEXT_TOKENS = 16
"""Length of the longest caption, in tokens of any text encoder."""

REWARDS: Mapping[str, Mapping[str, Any]] = {
    "clipscore": {"model": "../mini-clip"},
    "pickscore": {"model": "../mini-pickscore"},
    "hpsv2": {
        "checkpoint": "../mini-hpsv2/HPS_mini_compressed.pt",
        "processor": "../mini-hpsv2",
        "vision_heads": 4,
        "text_heads": 4,
    },
    "imagereward": {"model": "../mini-imagereward"},
}
"""Reward options in each pipeline's `solrl.json`; paths are relative to the pipeline's folder."""

Tokens = dict[str, torch.Tensor]
"""Token ids and masks of captions by name; the first axis is the caption."""


@dataclass(frozen=True)
class Family:
    """A miniature backbone's architecture.

    Attributes:
        build_autoencoder: builds an untrained autoencoder.
        build: builds an untrained pipeline around a trained autoencoder.
        tokenize: (pipeline, captions) → tokens.
        encode: (pipeline, tokens) → conditioning of the backbone's `velocity`, differentiable.
        settings: `solrl.json`; size and rewards are by default those of the shapes world.
        time_shift: shift of half of the training times towards the noisy end, where the layout is decided.
        source: draws and renders its world, from a seed and whether contents are held out.
        accuracy: measures a trained model on so many held-out prompts, see `measure.accuracy`.
        adopt: copies the trained text encoders and tokenizers of another pipeline.
        frozen_text: leave the text encoders as they are.
    """

    build_autoencoder: Callable[[], Any]
    build: Callable[[Any], Any]
    tokenize: Callable[[Any, list[str]], Tokens]
    encode: Callable[[Any, Tokens], Conditioning]
    settings: Mapping[str, Any]
    time_shift: float = 1.0
    adopt: Callable[[Any, Any], None] | None = None
    frozen_text: bool = False
    source: Callable[..., World] = Source
    accuracy: Callable[..., tuple[dict[str, Any], torch.Tensor]] = measure.accuracy

    @property
    def options(self) -> dict[str, Any]:
        """Complete content of `solrl.json`."""
        return {"height": 64, "width": 64, "max_sequence_length": TEXT_TOKENS, "rewards": REWARDS, **self.settings}


def text_encoders(pipeline: Any) -> list[torch.nn.Module]:
    """Text encoders of a pipeline."""
    return [part for name, part in pipeline.components.items() if name.startswith("text_encoder")]


def wrap(family: Family, pipeline: Any) -> Backbone:
    """Wrap a pipeline as the backbone that service and trainer use; parts are shared, not copied."""
    options = dict(family.options)
    for name in ("quantize", "keep"):
        options[name] = tuple(options[name])
    return FAMILIES.find(type(pipeline).__name__)(pipeline, "miniature", ModelOptions(**options))


def padded(tokenizer: Any, texts: list[str]) -> Any:
    """Tokenize captions to ids and mask, padded on the right to `TEXT_TOKENS`."""
    return tokenizer(
        texts,
        padding="max_length",
        padding_side="right",
        max_length=TEXT_TOKENS,
        truncation=True,
        return_tensors="pt",
    )
