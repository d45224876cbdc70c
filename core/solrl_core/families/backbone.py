"""Interface of a backbone family: all that the sampler, the algorithms and the service use of a model."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from solrl_core.model_options import ModelOptions
from solrl_core.precision.layer_policy import LayerPolicy, linear_flops, share_of_flops
from solrl_core.sampling.prompt_cache import PromptCache

Conditioning = dict[str, Tensor]
"""Prompt embeddings: named tensors whose first axis is the prompt."""


def stack(conditionings: Sequence[Conditioning]) -> Conditioning:
    """Concatenate several conditionings along the prompt axis."""
    return {name: torch.cat([c[name] for c in conditionings]) for name in conditionings[0]}


class Backbone(ABC):
    """A loaded text-to-image flow model.

    Attributes:
        family: registered name, e.g. "sana".
        name: the model's name in requests.
        transformer: the clean base. A `Generator` copies it and never modifies it.
        device: device of all parts.
        dtype: dtype of the transformer's arithmetic.
        height: default height of an image in pixels.
        width: default width of an image in pixels.
        frames: frames of a sample: 1 for an image, more for a clip.
        frame_step: frames of a clip for each further one of its latents [C, T, ...]; 0 for a family of images.
        lora_targets: regular expression that matches the whole dotted name of each module that LoRA adapts.
        policy: layers to quantise at nvfp4.
        fp8_policy: layers to quantise at fp8.
        kept: precision → patterns of layers that this model needs in BF16 beside its family's, see `layer_list`.
        blocks: names of the transformer's lists of blocks, in the order that they run in; the quantised share is
            relative to their FLOPs.
        one_length: whether all prompts have equally many tokens. If not, blocks compile for the first number and then
            for any.
        parts: the parts that digests cover, by name.
    """

    family: str
    name: str
    transformer: nn.Module
    device: torch.device
    dtype: torch.dtype
    height: int
    width: int
    frames: int = 1
    frame_step: int = 0
    lora_targets: str
    policy: LayerPolicy
    fp8_policy: LayerPolicy
    kept: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    blocks: tuple[str, ...] = ("transformer_blocks",)
    one_length: bool = True
    parts: Mapping[str, Any]
    options: ModelOptions

    def policy_at(self, precision: str) -> LayerPolicy:
        """Layer policy at "nvfp4" or "fp8", without the layers that are `kept` there."""
        policy = self.fp8_policy if precision == "fp8" else self.policy
        return replace(policy, keep=(*policy.keep, *self.kept.get(precision, ())))

    def quantized_share(self, precision: str) -> float:
        """Share (0 to 1) of the blocks' linear FLOPs that are quantised at a precision."""
        if precision == "bf16":
            return 0.0
        return self.share_of(self.policy_at(precision).select(self.transformer))

    def share_of(self, layers: Collection[str]) -> float:
        """Share (0 to 1) of the blocks' linear FLOPs that the named layers spend."""
        return share_of_flops(self._flops, layers, self.blocks)

    @cached_property
    def _flops(self) -> dict[str, int]:
        """FLOPs of one forward pass for one candidate, by layer of the transformer."""
        conditioning = self.encode(["a"])
        latents = torch.zeros(1, *self.latent_shape, device=self.device)
        sigma = torch.ones(1, device=self.device)
        return linear_flops(self.transformer, lambda: self.velocity(self.transformer, latents, sigma, conditioning))

    @property
    def unused_lora_layers(self) -> str | None:
        """Regular expression of the whole dotted names of adapted layers whose output nothing uses; by default none.

        They get no gradient. Training refuses other layers without one.
        """
        return None

    @property
    def pipeline_arguments(self) -> dict[str, Any]:
        """Arguments that make the diffusers pipeline generate as here without guidance; {} without a pipeline."""
        return {}

    @property
    @abstractmethod
    def latent_shape(self) -> tuple[int, ...]:
        """Shape of one candidate's latents at the default size."""

    @abstractmethod
    def sigmas(self, steps: int) -> list[float]:
        """Noise schedule of the family: `steps + 1` values from 1 to 0."""

    @abstractmethod
    def encode(self, prompts: Sequence[str], guidance: float = 1.0) -> Conditioning:
        """Encode prompts; for guidance above 1, include the embeddings that it needs."""

    def conditioning(self, prompt: str, guidance: float = 1.0) -> Conditioning:
        """Conditioning of one prompt, from the cache that all users of this backbone share.

        The encoding depends on neither precision nor adapter. Threads may share the backbone.
        """
        key = (prompt, max(guidance, 1.0))
        return self._prompts.get(key, lambda: self.encode([prompt], guidance))

    def stack(self, conditionings: Sequence[Conditioning]) -> Conditioning:
        """Conditioning of a batch, a row for each; equal rows may be views of one."""
        return stack(conditionings)

    def cache_at_least(self, prompts: int) -> None:
        """Keep the conditioning of the newest `prompts` prompts, even if the cache grows beyond its usual size."""
        self._prompts.least = prompts

    def truncated_tokens(self, prompts: Sequence[str]) -> list[int]:
        """Number of tokens that every text encoder cuts off, per prompt.

        Prompts that differ only in the cut part give the same image.
        """
        return [0] * len(prompts)

    @cached_property
    def _prompts(self) -> PromptCache:
        return PromptCache()

    @abstractmethod
    def velocity(
        self, transformer: nn.Module, latents: Tensor, sigma: Tensor, conditioning: Conditioning, guidance: float = 1.0
    ) -> Tensor:
        """Velocity [B, ...] float32 that `transformer` predicts at (latents [B, ...], sigma [B]); differentiable."""

    @abstractmethod
    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents [B, ...] to images [B, 3, H, W], or clips [B, F, 3, H, W]; float32 in [0, 1]."""

    def compile(self, transformer: nn.Module) -> None:
        """Compile a generator's transformer for a GPU, in place. Each batch size compiles on its first call."""
        raise_recompile_limit()
        for name in self.blocks:
            for block in transformer.get_submodule(name).children():
                block.compile(dynamic=False if self.one_length else None)


def raise_recompile_limit() -> None:
    """Let torch compile blocks as often as needed: all of a kind share one code object, for each precision and size."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
