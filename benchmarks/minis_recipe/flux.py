"""The miniature FLUX.1-dev: pooled CLIP and T5, double- and single-stream blocks, guidance embedding, 64 tokens."""

from typing import Any

from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from solrl_core.families import Conditioning
from transformers import CLIPTextModel

from minis_recipe.autoencoder import build_kl
from minis_recipe.family import TEXT_TOKENS, Family, Tokens, padded
from minis_recipe.text import T5_WIDTH, clip_config, t5_encoder
from minis_recipe.tokenizers import clip_tokenizer, t5_tokenizer

CLIP_WIDTH = T5_WIDTH // 2


def build(autoencoder: AutoencoderKL) -> FluxPipeline:
    """Build an untrained pipeline of the shipped size around a trained autoencoder."""
    clip, t5 = clip_tokenizer(TEXT_TOKENS), t5_tokenizer(TEXT_TOKENS)
    transformer = FluxTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=4,
        num_attention_heads=4,
        attention_head_dim=32,
        joint_attention_dim=T5_WIDTH,
        pooled_projection_dim=CLIP_WIDTH,
        guidance_embeds=True,
        axes_dims_rope=(8, 12, 12),
    )
    return FluxPipeline(
        transformer=transformer,
        # Dynamic as in FLUX.1-dev; at 64 tokens the shift is 2.6.
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True, base_shift=1.0, max_shift=1.65),
        vae=autoencoder,
        text_encoder=CLIPTextModel(clip_config(clip, CLIP_WIDTH)),
        tokenizer=clip,
        text_encoder_2=t5_encoder(t5),
        tokenizer_2=t5,
    )


def _tokenize(pipeline: Any, texts: list[str]) -> Tokens:
    return {
        "clip": padded(pipeline.tokenizer, texts).input_ids,
        "t5": padded(pipeline.tokenizer_2, texts).input_ids,
    }


def _encode(pipeline: Any, tokens: Tokens) -> Conditioning:
    pooled = pipeline.text_encoder(tokens["clip"]).pooler_output
    return {"states": pipeline.text_encoder_2(tokens["t5"])[0], "pooled": pooled}


def _adopt(pipeline: Any, sd3: Any) -> None:
    """Copy CLIP-L and T5 from Stable Diffusion 3, with which FLUX.1 shares them."""
    pipeline.tokenizer, pipeline.tokenizer_2 = sd3.tokenizer, sd3.tokenizer_3
    pipeline.text_encoder_2.load_state_dict(sd3.text_encoder_3.state_dict())
    theirs = sd3.text_encoder.state_dict()
    pipeline.text_encoder.load_state_dict(
        {name: theirs[f"text_model.{name}"] for name in pipeline.text_encoder.state_dict()}
    )


FLUX = Family(
    build_autoencoder=build_kl,
    build=build,
    tokenize=_tokenize,
    encode=_encode,
    settings={
        "quantize": [r"^(single_)?transformer_blocks\."],
        # Layers with the largest rounding error per FLOP: 9 % of the blocks' linear FLOPs, a third of the error.
        "keep": [
            r"\.norm1\.",
            r"\.norm\.",
            r"\.to_out\.",
            r"^single_transformer_blocks\.\d+\.attn\.to_v$",
            r"^transformer_blocks\.1\.attn\.to_v$",
        ],
        "keep_max_dim": 0,
    },
    time_shift=4.0,
    adopt=_adopt,
    frozen_text=True,
)
