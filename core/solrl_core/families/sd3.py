"""Stable Diffusion 3 and 3.5: two CLIP text encoders and T5, joint-attention transformer, 16-channel VAE.

Source: Esser et al., arXiv 2403.03206; layer choices of Sol-RL, arXiv 2604.06916, in diffusers' names.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from solrl_core.families.backbone import Conditioning
from solrl_core.families.pipeline import PipelineBackbone, replace_children
from solrl_core.families.sd3_fused import Sd3FusedBlock
from solrl_core.model_options import MODELS_OWN, ImageSize
from solrl_core.precision import LayerPolicy


class StableDiffusion3(PipelineBackbone):
    """A Stable Diffusion 3 pipeline loaded through diffusers.

    `max_sequence_length` counts T5's tokens. They follow CLIP's, which are always 77.
    """

    family = "sd3"
    max_sequence_length = 128
    file_encoders = ("clip_l", "clip_g", "t5xxl")
    lora_targets = r"transformer_blocks\.\d+\.attn\.(add_[qkv]_proj|to_add_out|to_[qkv]|to_out\.0)"
    # The paper's list also has pos_embed, which is a convolution over 2×2 patches here and never quantised. It is for
    # SD3.5-Large, whose attention is 2432 wide; of SD3.5-Medium, 1536 wide, it keeps attention likewise.
    quantize = (r"^transformer_blocks\.",)
    keep = ("context_embedder", "time_text_embed", "norm_out", "norm1", "ff_context")
    keep_max_dim = 2432
    fp8_policy = LayerPolicy(quantize=(r"^transformer_blocks\.",), keep=("norm1",))

    @classmethod
    def own_size(cls, config: Mapping[str, Any]) -> ImageSize:
        """The training size of Flow-GRPO, DiffusionNFT and AWM for SD3.5-Medium, the one model with dual attention."""
        return ImageSize(512, 512) if config.get("dual_attention_layers") else MODELS_OWN

    def sigmas(self, steps: int) -> list[float]:
        """Schedule of the pipeline: a static shift (3 for the released models), or a dynamic one if so configured."""
        return self._flow_match_sigmas(steps)

    def fuse(self, transformer: nn.Module) -> None:
        """Swap in blocks that fuse norms with quantisation and quantise a shared input once."""
        super().fuse(transformer)
        replace_children(transformer.get_submodule("transformer_blocks"), Sd3FusedBlock)

    @torch.no_grad()
    def encode(self, prompts: Sequence[str], guidance: float = 1.0) -> Conditioning:
        """CLIP's and T5's states in one sequence, and CLIP's pooled embedding; with guidance above 1, also for ""."""
        states, negative_states, pooled, negative_pooled = self._pipeline.encode_prompt(
            list(prompts),
            None,
            None,
            device=self.device,
            do_classifier_free_guidance=guidance > 1,
            max_sequence_length=self.max_sequence_length,
        )
        conditioning = {"states": states, "pooled": pooled}
        if guidance > 1:
            conditioning |= {"negative_states": negative_states, "negative_pooled": negative_pooled}
        return conditioning

    def predict(
        self, transformer: nn.Module, latents: torch.Tensor, sigma: torch.Tensor, conditioning: Conditioning
    ) -> torch.Tensor:
        """Velocity from one forward pass."""
        out: torch.Tensor = transformer(
            latents.to(self.dtype),
            encoder_hidden_states=conditioning["states"].to(self.dtype),
            pooled_projections=conditioning["pooled"].to(self.dtype),
            timestep=sigma.to(self.device) * 1000,
            return_dict=False,
        )[0]
        return out.float()
