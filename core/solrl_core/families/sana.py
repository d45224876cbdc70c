"""SANA: Gemma-2 text encoder, linear-attention transformer, DC-AE.

Source: Xie et al., arXiv 2410.10629; layer choices of Sol-RL, arXiv 2604.06916, in diffusers' names.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from solrl_core.families.base import Backbone, Conditioning, ModelOptions
from solrl_core.precision import LayerPolicy
from solrl_core.sampler import unshifted_sigmas

PIPELINE = "SanaPipeline"
MAX_SEQUENCE_LENGTH = 300
LORA_TARGETS = r"transformer_blocks\.\d+\.attn[12]\.(to_q|to_k|to_v|to_out\.0)"

# What the paper leaves quantised: cross-attention keys and values (one fused, larger layer in the authors'
# naming) and the feed-forward. Everything outside the blocks stays in BF16.
QUANTIZE = (r"^transformer_blocks\.",)
KEEP = (r"attn1\.", r"attn2\.to_q$", r"attn2\.to_out\.0$")


class Sana(Backbone):
    """A SANA pipeline loaded through diffusers."""

    family = "sana"
    lora_targets = LORA_TARGETS

    def __init__(self, pipeline: Any, name: str, options: ModelOptions) -> None:
        self.name = name
        self.options = options
        self._pipeline = pipeline
        self._vae = pipeline.vae
        self.transformer: nn.Module = pipeline.transformer
        self.device = next(self.transformer.parameters()).device
        self.dtype = next(self.transformer.parameters()).dtype
        self._scale: int = pipeline.vae_scale_factor
        size: int = pipeline.transformer.config.sample_size * self._scale
        self.height = options.height or size
        self.width = options.width or size
        self.policy = LayerPolicy(
            quantize=QUANTIZE if options.quantize is None else options.quantize,
            keep=KEEP if options.keep is None else options.keep,
        )
        self.parts = {
            "transformer": pipeline.transformer,
            "text_encoder": pipeline.text_encoder,
            "tokenizer": pipeline.tokenizer,
            "vae": pipeline.vae,
            "scheduler": pipeline.scheduler,
        }

    @property
    def latent_shape(self) -> tuple[int, ...]:
        """(channels, height / f, width / f)."""
        channels: int = self._pipeline.transformer.config.in_channels
        return channels, self.height // self._scale, self.width // self._scale

    def sigmas(self, steps: int) -> list[float]:
        """Unshifted."""
        return unshifted_sigmas(steps)

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], guidance: float = 1.0) -> Conditioning:
        """Gemma-2 states and masks; with guidance above 1 also those of the empty prompt."""
        extra = {}
        if self.options.complex_human_instruction is not None:
            extra["complex_human_instruction"] = self.options.complex_human_instruction
        states, mask, negative_states, negative_mask = self._pipeline.encode_prompt(
            list(prompts),
            do_classifier_free_guidance=guidance > 1,
            device=self.device,
            max_sequence_length=self.options.max_sequence_length or MAX_SEQUENCE_LENGTH,
            **extra,
        )
        conditioning = {"states": states, "mask": mask}
        if guidance > 1:
            conditioning |= {"negative_states": negative_states, "negative_mask": negative_mask}
        return conditioning

    def velocity(
        self,
        transformer: nn.Module,
        latents: torch.Tensor,
        sigma: torch.Tensor,
        conditioning: Conditioning,
        guidance: float = 1.0,
    ) -> torch.Tensor:
        """One pass, or two in one batch with classifier-free guidance."""
        states, mask = conditioning["states"], conditioning["mask"]
        if guidance > 1:
            latents, sigma = torch.cat([latents, latents]), torch.cat([sigma, sigma])
            states = torch.cat([conditioning["negative_states"], states])
            mask = torch.cat([conditioning["negative_mask"], mask])
        scale: float = self._pipeline.transformer.config.timestep_scale
        out: torch.Tensor = transformer(
            latents.to(self.dtype),
            encoder_hidden_states=states.to(self.dtype),
            encoder_attention_mask=mask,
            timestep=sigma.to(self.device) * 1000 * scale,
            return_dict=False,
        )[0].float()
        if guidance > 1:
            without, with_prompt = out.chunk(2)
            out = without + guidance * (with_prompt - without)
        return out

    @torch.no_grad()
    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Images through the DC-AE."""
        vae = self._vae
        out: torch.Tensor = vae.decode(latents.to(vae.dtype) / vae.config.scaling_factor, return_dict=False)[0]
        return (out.float() / 2 + 0.5).clamp(0, 1)
