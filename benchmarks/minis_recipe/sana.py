"""The miniature SANA: Gemma-2 text encoder, linear-attention transformer, 16 image tokens."""

from typing import Any

from diffusers import AutoencoderDC, FlowMatchEulerDiscreteScheduler, SanaPipeline, SanaTransformer2DModel
from solrl_core.families import Conditioning
from transformers import Gemma2Config, Gemma2Model

from minis_recipe.autoencoder import build_dc
from minis_recipe.family import Family, Tokens, padded
from minis_recipe.tokenizers import gemma_tokenizer


def build(autoencoder: AutoencoderDC) -> SanaPipeline:
    """Build an untrained pipeline of the shipped size around a trained autoencoder."""
    tokenizer = gemma_tokenizer()
    text_encoder = Gemma2Model(
        Gemma2Config(
            vocab_size=len(tokenizer),
            hidden_size=96,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=24,
            query_pre_attn_scalar=24,
            max_position_embeddings=64,
            sliding_window=64,
            attn_implementation="eager",
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    transformer = SanaTransformer2DModel(
        in_channels=8,
        out_channels=8,
        num_attention_heads=6,
        attention_head_dim=32,
        num_layers=5,
        num_cross_attention_heads=6,
        cross_attention_head_dim=32,
        cross_attention_dim=192,
        caption_channels=96,
        mlp_ratio=2.0,
        sample_size=8,
        patch_size=2,
        interpolation_scale=1,
    )
    return SanaPipeline(
        tokenizer=tokenizer,
        text_encoder=text_encoder,
        vae=autoencoder,
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
    )


def _tokenize(pipeline: Any, texts: list[str]) -> Tokens:
    found = padded(pipeline.tokenizer, texts)
    return {"ids": found.input_ids, "mask": found.attention_mask}


def _encode(pipeline: Any, tokens: Tokens) -> Conditioning:
    states = pipeline.text_encoder(tokens["ids"], attention_mask=tokens["mask"])[0]
    return {"states": states, "mask": tokens["mask"]}


SANA = Family(
    build_autoencoder=build_dc,
    build=build,
    tokenize=_tokenize,
    encode=_encode,
    settings={
        "complex_human_instruction": [],
        "quantize": [r"^transformer_blocks\."],
        "keep": [r"transformer_blocks\.0\.attn2\."],
    },
)
