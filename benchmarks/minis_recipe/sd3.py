"""The miniature Stable Diffusion 3: two CLIP text encoders and T5, joint attention, 64 image tokens."""

from typing import Any

import torch
import torch.nn.functional as F
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from solrl_core.families import Conditioning
from transformers import CLIPTextModelWithProjection, CLIPTokenizer, T5TokenizerFast

from minis_recipe.autoencoder import build_kl
from minis_recipe.family import TEXT_TOKENS, Family, Tokens, padded
from minis_recipe.text import T5_WIDTH, clip_config, t5_encoder
from minis_recipe.tokenizers import clip_tokenizer, t5_tokenizer

CLIP_WIDTH = T5_WIDTH // 2
SHIFT = 2.5


def build(autoencoder: AutoencoderKL) -> StableDiffusion3Pipeline:
    """Build an untrained pipeline of the shipped size around a trained autoencoder."""
    return assemble(autoencoder, clip_tokenizer(TEXT_TOKENS), t5_tokenizer(TEXT_TOKENS), layers=4, heads=4, patch=2)


def assemble(
    autoencoder: AutoencoderKL, clip: CLIPTokenizer, t5: T5TokenizerFast, layers: int, heads: int, patch: int
) -> StableDiffusion3Pipeline:
    """Build an untrained pipeline for up to 16×16 latents, with heads of 32 channels."""
    transformer = SD3Transformer2DModel(
        sample_size=16,
        patch_size=patch,
        in_channels=4,
        out_channels=4,
        num_layers=layers,
        num_attention_heads=heads,
        attention_head_dim=32,
        joint_attention_dim=T5_WIDTH,
        caption_projection_dim=32 * heads,
        pooled_projection_dim=2 * CLIP_WIDTH,
        pos_embed_max_size=16 // patch,
        qk_norm="rms_norm",
    )
    return StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
        vae=autoencoder,
        text_encoder=CLIPTextModelWithProjection(clip_config(clip, CLIP_WIDTH)),
        tokenizer=clip,
        text_encoder_2=CLIPTextModelWithProjection(clip_config(clip, CLIP_WIDTH)),
        tokenizer_2=clip,
        text_encoder_3=t5_encoder(t5),
        tokenizer_3=t5,
    )


def _tokenize(pipeline: Any, texts: list[str]) -> Tokens:
    return {
        "clip": padded(pipeline.tokenizer, texts).input_ids,
        "t5": padded(pipeline.tokenizer_3, texts).input_ids,
    }


def _encode(pipeline: Any, tokens: Tokens) -> Conditioning:
    outputs = [
        encoder(tokens["clip"], output_hidden_states=True)
        for encoder in (pipeline.text_encoder, pipeline.text_encoder_2)
    ]
    t5 = pipeline.text_encoder_3(tokens["t5"])[0]
    clip = torch.cat([out.hidden_states[-2] for out in outputs], -1)
    clip = F.pad(clip, (0, t5.shape[-1] - clip.shape[-1]))
    return {"states": torch.cat([clip, t5], 1), "pooled": torch.cat([out.text_embeds for out in outputs], -1)}


SD3 = Family(
    build_autoencoder=build_kl,
    build=build,
    tokenize=_tokenize,
    encode=_encode,
    settings={
        "quantize": [r"^transformer_blocks\."],
        # Layers with the largest rounding error per FLOP: 9 % of the blocks' linear FLOPs, half of the error.
        "keep": [
            r"\.norm1\.",
            r"^transformer_blocks\.[23]\.attn\.to_out\.",
            r"^transformer_blocks\.3\.ff\.net\.2$",
        ],
        "keep_max_dim": 0,
    },
    time_shift=4.0,
)
