"""What a backbone family provides. Sampler, objectives and service know only this."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from solrl_core.precision import LayerPolicy, linear_flops, share_of_flops

Conditioning = dict[str, torch.Tensor]
"""Encoded prompts: named tensors whose first axis is the prompt."""


def stack(conditionings: Sequence[Conditioning]) -> Conditioning:
    """Rows of several conditionings, one after the other."""
    return {name: torch.cat([c[name] for c in conditionings]) for name in conditionings[0]}


@dataclass(frozen=True)
class ModelOptions:
    """A model's own settings, read from `solrl.json` beside its model_index.json; None means the family's default.

    Attributes:
        height, width: image size in pixels.
        max_sequence_length: text tokens.
        complex_human_instruction: SANA's prompt prefix; an empty list turns it off.
        quantize, keep, keep_max_dim: the layer policy.
        rewards: reward name → options of its loader, paths relative to the folder.
    """

    height: int | None = None
    width: int | None = None
    max_sequence_length: int | None = None
    complex_human_instruction: list[str] | None = None
    quantize: tuple[str, ...] | None = None
    keep: tuple[str, ...] | None = None
    keep_max_dim: int | None = None
    rewards: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


class Backbone(ABC):
    """A loaded text-to-image flow model.

    Attributes:
        family: registered name, e.g. "sana".
        name: the model's name in requests.
        transformer: the clean base, never modified by a `Generator` (which copies it).
        device: where its parts live.
        dtype: what its transformer computes in.
        height, width: default image size in pixels.
        lora_targets: regular expression (whole dotted name) of the modules that LoRA adapts.
        policy: which layers are quantised at nvfp4.
        fp8_policy: which are at fp8.
        blocks: names of the transformer's lists of blocks, of whose work the quantised share is taken.
        parts: what digests are taken of, by name.
    """

    family: str
    name: str
    transformer: nn.Module
    device: torch.device
    dtype: torch.dtype
    height: int
    width: int
    lora_targets: str
    policy: LayerPolicy
    fp8_policy: LayerPolicy
    blocks: tuple[str, ...] = ("transformer_blocks",)
    parts: Mapping[str, Any]
    options: ModelOptions

    def policy_at(self, precision: str) -> LayerPolicy:
        """Which layers are quantised at "nvfp4" or "fp8"."""
        return self.fp8_policy if precision == "fp8" else self.policy

    def quantized_share(self, precision: str) -> float:
        """Share (0 to 1) of the blocks' linear FLOPs that is quantised at a precision."""
        if precision == "bf16":
            return 0.0
        return share_of_flops(self._flops, self.policy_at(precision).select(self.transformer), self.blocks)

    @cached_property
    def _flops(self) -> dict[str, int]:
        """Layer of the transformer → FLOPs of one pass for one candidate."""
        conditioning = self.encode(["a"])
        latents = torch.zeros(1, *self.latent_shape, device=self.device)
        sigma = torch.ones(1, device=self.device)
        return linear_flops(self.transformer, lambda: self.velocity(self.transformer, latents, sigma, conditioning))

    @property
    @abstractmethod
    def latent_shape(self) -> tuple[int, ...]:
        """Shape of one candidate's latents at the default size."""

    @abstractmethod
    def sigmas(self, steps: int) -> list[float]:
        """The family's schedule: `steps + 1` values from 1 to 0."""

    @abstractmethod
    def encode(self, prompts: Sequence[str], guidance: float = 1.0) -> Conditioning:
        """Encode prompts, with what guidance above 1 needs besides."""

    @abstractmethod
    def velocity(
        self,
        transformer: nn.Module,
        latents: torch.Tensor,
        sigma: torch.Tensor,
        conditioning: Conditioning,
        guidance: float = 1.0,
    ) -> torch.Tensor:
        """Velocity at (latents [B, ...], sigma [B]) by `transformer`; float32, gradients flow if enabled."""

    @abstractmethod
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Images [B, 3, H, W] float32 in [0, 1]."""

    def compile(self, transformer: nn.Module) -> None:
        """Make a generator's transformer fast on a GPU, in place; compiled when first called with each batch size."""
        # One code object serves all blocks of a kind, at every precision and batch size.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
        for name in self.blocks:
            for block in transformer.get_submodule(name).children():
                block.compile(dynamic=False)
