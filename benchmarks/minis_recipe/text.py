"""Miniature text encoders shared by SD3 and FLUX.1."""

from typing import Any

from transformers import CLIPTextConfig, T5Config, T5EncoderModel

from minis_recipe.family import TEXT_TOKENS

T5_WIDTH = 96


def clip_config(tokenizer: Any, width: int) -> CLIPTextConfig:
    """Configuration of a two-layer CLIP text encoder; SD3 uses the states between the layers."""
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        projection_dim=width,
        num_hidden_layers=2,
        num_attention_heads=width // 16,
        max_position_embeddings=TEXT_TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def t5_encoder(tokenizer: Any) -> T5EncoderModel:
    """Untrained two-layer T5 encoder with gated feed-forward."""
    return T5EncoderModel(
        T5Config(
            vocab_size=len(tokenizer),
            d_model=T5_WIDTH,
            d_kv=24,
            d_ff=128,
            num_layers=2,
            num_heads=4,
            relative_attention_num_buckets=16,
            relative_attention_max_distance=TEXT_TOKENS,
            feed_forward_proj="gated-gelu",
            dropout_rate=0.0,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
