"""What the families have in common: a backbone around a loaded diffusers pipeline."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn

from solrl_core.families.base import Backbone, Conditioning, ModelOptions
from solrl_core.precision import LayerPolicy
from solrl_core.precision.fuse import fuse_feed_forwards

Predict = Callable[[torch.Tensor, torch.Tensor, Conditioning], torch.Tensor]
"""(latents [B, ...], sigma [B], conditioning) → velocity [B, ...] float32."""

_LISTS = (nn.ModuleList, nn.Sequential)

# Optional parts that an image from a prompt alone never passes through.
_UNUSED = ("image_encoder", "feature_extractor")


class PipelineBackbone(Backbone):
    """A backbone whose parts are a diffusers pipeline's.

    Attributes:
        quantize, keep, keep_max_dim: the family's layer policy at nvfp4, where the model's options give no other.
        max_sequence_length: the family's text tokens, where the model's options give no other.
    """

    quantize: tuple[str, ...]
    keep: tuple[str, ...]
    keep_max_dim: int = 0
    max_sequence_length: int

    def __init__(self, pipeline: Any, name: str, options: ModelOptions) -> None:
        self.name = name
        self.options = options
        self._pipeline = pipeline
        self.transformer: nn.Module = pipeline.transformer
        self._config = pipeline.transformer.config
        weight = next(self.transformer.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        self._scale: int = pipeline.vae_scale_factor
        self.height = options.height or self._default_size()
        self.width = options.width or self._default_size()
        multiple = self._scale * self._patch_size
        if self.height % multiple or self.width % multiple:
            raise ValueError(
                f"got images of {self.width}×{self.height} px; {name} makes multiples of {multiple} px: "
                "set height and width in its solrl.json"
            )
        self.policy = LayerPolicy(
            quantize=self.quantize if options.quantize is None else options.quantize,
            keep=self.keep if options.keep is None else options.keep,
            keep_max_dim=self.keep_max_dim if options.keep_max_dim is None else options.keep_max_dim,
        )
        self.parts = {
            part: found for part, found in pipeline.components.items() if found is not None and part not in _UNUSED
        }
        if options.max_sequence_length is not None:
            self.max_sequence_length = options.max_sequence_length

    def again(self) -> Self:
        """The same backbone, made anew from its pipeline, whose parts have moved."""
        return type(self)(self._pipeline, self.name, self.options)

    @classmethod
    def components(cls, folder: Path, dtype: torch.dtype) -> dict[str, Any]:
        """Parts of the pipeline in `folder` which diffusers cannot load by itself, loaded; most often none."""
        return {}

    def _default_size(self) -> int:
        """Height and width in pixels where the model's options give none."""
        size: int = self._config.sample_size
        return size * self._scale

    @property
    def _patch_size(self) -> int:
        """Latent pixels along the side of one image token."""
        size: int = self._config.patch_size
        return size

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """(channels, height / f, width / f)."""
        channels: int = self._pipeline.vae.config.latent_channels
        return channels, self.height // self._scale, self.width // self._scale

    @torch.no_grad()
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Images through the autoencoder."""
        vae = self._pipeline.vae
        scaled = latents.to(vae.dtype) / vae.config.scaling_factor + (vae.config.get("shift_factor") or 0)
        out: torch.Tensor = vae.decode(scaled, return_dict=False)[0]
        return (out.float() / 2 + 0.5).clamp(0, 1)

    def compile(self, transformer: nn.Module) -> None:
        """Its blocks, after what is faster as one kernel has been swapped in; and the decoder's."""
        self.fuse(transformer)
        super().compile(transformer)
        vae = self._pipeline.vae
        decoder = getattr(vae, "decoder", None)
        # A video's autoencoder has five axes, and no such layout.
        if decoder is not None and all(p.ndim < 5 for p in vae.parameters()):
            vae.to(memory_format=torch.channels_last)
            for block in listed_blocks(decoder):
                if block._compiled_call_impl is None:
                    block.compile(dynamic=False)

    def fuse(self, transformer: nn.Module) -> None:
        """Swap in, in place, what a GPU computes faster than what diffusers wrote; equal up to rounding."""
        fuse_feed_forwards(transformer)

    def _flow_match_sigmas(self, steps: int, unshifted: list[float] | None = None) -> list[float]:
        """`steps + 1` sigmas of the pipeline's FlowMatchEulerDiscreteScheduler at the default size.

        Args:
            steps: solver steps.
            unshifted: the `steps` sigmas before any shift; None for the scheduler's own.
        """
        from diffusers import FlowMatchEulerDiscreteScheduler
        from diffusers.pipelines.flux.pipeline_flux import calculate_shift

        # A new one, because setting the steps changes a scheduler, and threads may share this backbone.
        scheduler = FlowMatchEulerDiscreteScheduler.from_config(self._pipeline.scheduler.config)
        config = scheduler.config
        _, height, width = self.latent_shape
        tokens = (height // self._patch_size) * (width // self._patch_size)
        # Used by schedulers with dynamic shifting only.
        mu = calculate_shift(
            tokens, config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift
        )
        scheduler.set_timesteps(steps, sigmas=unshifted, mu=mu)
        sigmas: list[float] = scheduler.sigmas.tolist()
        return sigmas


def listed_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The blocks in a module's lists, or in theirs: few kinds, which compile faster than all of it as one graph.

    What stands outside of lists is none, nor is attention, which has a list of its own.
    """
    for child in module.children():
        if isinstance(child, _LISTS) or any(isinstance(part, _LISTS) for part in child.children()):
            yield from listed_blocks(child)
        elif isinstance(module, _LISTS) and any(True for _ in child.children()):
            yield child


def classifier_free(
    predict: Predict, latents: torch.Tensor, sigma: torch.Tensor, conditioning: Conditioning, guidance: float
) -> torch.Tensor:
    """Velocity by `predict`; with guidance above 1, led away from the one for the empty prompt.

    The empty prompt's tensors are those of `conditioning` named `negative_`…; both are predicted in one batch.

    Source: Ho & Salimans, arXiv 2207.12598.
    """
    if guidance <= 1:
        return predict(latents, sigma, conditioning)
    prompt = {name: tensor for name, tensor in conditioning.items() if not name.startswith("negative_")}
    both = {name: torch.cat([conditioning[f"negative_{name}"], tensor]) for name, tensor in prompt.items()}
    without, towards = predict(torch.cat([latents, latents]), torch.cat([sigma, sigma]), both).chunk(2)
    return without + guidance * (towards - without)
