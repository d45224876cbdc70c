"""Stable Diffusion 3 and 3.5: two CLIP text encoders and T5, joint-attention transformer, 16-channel VAE.

Source: Esser et al., arXiv 2403.03206; layer choices of Sol-RL, arXiv 2604.06916, in diffusers' names.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from solrl_core.families.backbone import Conditioning
from solrl_core.families.pipeline import PipelineBackbone, replace_children
from solrl_core.kernels.attention import attend
from solrl_core.kernels.bounded_attention import are_bounded
from solrl_core.model_options import MODELS_OWN, ImageSize
from solrl_core.precision.fp8 import Quantized, project
from solrl_core.precision.fuse import FusedBlock, add_and_feed_forward, image_layers, modulate, modulations, text_layers
from solrl_core.precision.layer_policy import LayerPolicy


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

    def predict(self, transformer: nn.Module, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        out: Tensor = transformer(
            latents.to(self.dtype),
            encoder_hidden_states=conditioning["states"].to(self.dtype),
            pooled_projections=conditioning["pooled"].to(self.dtype),
            timestep=sigma.to(self.device) * 1000,
            return_dict=False,
        )[0]
        return out.float()


class Sd3FusedBlock(FusedBlock):
    """Fused `JointTransformerBlock` of diffusers."""

    def __init__(self, block: Any) -> None:
        super().__init__(block)
        self.context_pre_only: bool = block.context_pre_only
        self.attn2 = block.attn2
        joint, second = self.attn, self.attn2
        self.bounded = are_bounded([joint.norm_q, joint.norm_added_q], [joint.norm_k, joint.norm_added_k])
        self.second_bounded = second is not None and are_bounded([second.norm_q], [second.norm_k])

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        joint_attention_kwargs: dict[str, Any] | None = None,
    ) -> tuple[Tensor | None, Tensor]:
        """Return text tokens [B, T, C] (None from the last block) and image tokens [B, S, C]."""
        x, text = hidden_states, encoder_hidden_states
        shift, scale, gate, *modulation = modulations(self.norm1, temb, 6 if self.attn2 is None else 9)
        if self.context_pre_only:
            text_scale, text_shift = modulations(self.norm1_context, temb, 2)
        else:
            text_shift, text_scale, text_gate, *text_rest = modulations(self.norm1_context, temb, 6)
        image_in = modulate(x, self.norm1.norm, scale, shift, image_layers(self.attn))
        text_in = modulate(text, self.norm1_context.norm, text_scale, text_shift, text_layers(self.attn))
        out, text_out = _joint_attention(self.attn, image_in, text_in, self.bounded)
        if self.attn2 is not None:
            shift, scale, second_gate = modulation[3:]
            image_in = modulate(x, self.norm1.norm, scale, shift, image_layers(self.attn2))
            x, out, gate = x + gate[:, None] * out, _attention(self.attn2, image_in, self.second_bounded), second_gate
        x = add_and_feed_forward(x, out, gate, self.norm2, modulation[:3], self.ff)
        if self.context_pre_only:
            return None, x
        return add_and_feed_forward(text, text_out, text_gate, self.norm2_context, text_rest, self.ff_context), x


def _joint_attention(
    attn: Any, x: Tensor | Quantized, text: Tensor | Quantized, bounded: bool
) -> tuple[Tensor, Tensor]:
    """Joint attention (diffusers' `Attention`) over image tokens [B, S, C] and text tokens [B, T, C].

    In the last block the text tokens skip the output projection, since nothing uses them.
    """
    of_image = _heads(attn, image_layers(attn), (attn.norm_q, attn.norm_k), x)
    of_text = _heads(attn, text_layers(attn), (attn.norm_added_q, attn.norm_added_k), text)
    query, key, value = (torch.cat(pair, 1) for pair in zip(of_image, of_text, strict=True))
    out = attend(query, key, value, bounded=bounded).flatten(2)
    image = of_image[0].shape[1]
    own_out, text_out = out[:, :image], out[:, image:]
    return attn.to_out[0](own_out), text_out if attn.context_pre_only else attn.to_add_out(text_out)


def _attention(attn: Any, x: Tensor | Quantized, bounded: bool) -> Tensor:
    """Self-attention over image tokens [B, S, C]."""
    attended = attend(*_heads(attn, image_layers(attn), (attn.norm_q, attn.norm_k), x), bounded=bounded)
    out: Tensor = attn.to_out[0](attended.flatten(2))
    return out


def _heads(
    attn: Any, layers: Sequence[nn.Module], norms: tuple[nn.Module | None, nn.Module | None], x: Tensor | Quantized
) -> tuple[Tensor, ...]:
    """Normalised queries, normalised keys and values, each [B, S, H, D], of tokens [B, S, C]."""
    query, key, value = (y.view(*y.shape[:2], attn.heads, -1) for y in project(layers, x))
    norm_query, norm_key = norms
    return norm_query(query) if norm_query else query, norm_key(key) if norm_key else key, value
