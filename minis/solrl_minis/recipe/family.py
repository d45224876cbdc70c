"""What the recipe must know of a backbone family; one module a family fills it in."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from solrl_core.families import Backbone, Conditioning, ModelOptions
from solrl_core.families.load import FAMILIES

TEXT_TOKENS = 16
"""The longest caption, in tokens of any of the text encoders."""

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
"""What each pipeline's `solrl.json` says of the rewards, relative to its own folder."""

Tokens = dict[str, torch.Tensor]
"""Token ids and masks of captions by name; the first axis is the caption."""


@dataclass(frozen=True)
class Family:
    """A miniature backbone's architecture.

    Attributes:
        build_autoencoder: makes an untrained autoencoder.
        build: makes an untrained pipeline around a trained autoencoder.
        tokenize: (pipeline, captions) → tokens.
        encode: (pipeline, tokens) → what the backbone's `velocity` takes, with gradients.
        settings: what `solrl.json` says beside size and rewards.
        time_shift: of half of the times that are trained on, towards the noisy end where the layout is decided.
        adopt: gives the pipeline another's trained text encoders and tokenizers, which then are not trained.
    """

    build_autoencoder: Callable[[], Any]
    build: Callable[[Any], Any]
    tokenize: Callable[[Any, list[str]], Tokens]
    encode: Callable[[Any, Tokens], Conditioning]
    settings: Mapping[str, Any]
    time_shift: float = 1.0
    adopt: Callable[[Any, Any], None] | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The whole of `solrl.json`."""
        return {"height": 64, "width": 64, "max_sequence_length": TEXT_TOKENS, **self.settings, "rewards": REWARDS}


def text_encoders(pipeline: Any) -> list[torch.nn.Module]:
    """The pipeline's text encoders."""
    return [part for name, part in pipeline.components.items() if name.startswith("text_encoder")]


def wrap(family: Family, pipeline: Any) -> Backbone:
    """The pipeline as the service and the trainer see it; the parts are shared, not copied."""
    options = dict(family.options)
    for name in ("quantize", "keep"):
        options[name] = tuple(options[name])
    return FAMILIES.find(type(pipeline).__name__)(pipeline, "miniature", ModelOptions(**options))


def padded(tokenizer: Any, texts: list[str]) -> Any:
    """Token ids and mask, each caption padded on the right to `TEXT_TOKENS`."""
    return tokenizer(
        texts,
        padding="max_length",
        padding_side="right",
        max_length=TEXT_TOKENS,
        truncation=True,
        return_tensors="pt",
    )
