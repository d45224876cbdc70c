"""The miniature Wan, which makes clips of the moving shapes world."""

from functools import partial
from typing import Any

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from solrl_core.families import Conditioning
from solrl_minis.motion_verifier import verify_motions
from transformers import UMT5Config, UMT5EncoderModel

from minis_recipe import measure, moving
from minis_recipe.family import TEXT_TOKENS, Family, Tokens, padded
from minis_recipe.text import T5_WIDTH, t5_encoder
from minis_recipe.tokenizers import t5_tokenizer

SHIFT = 3.0
Z_DIM = 16


def build_autoencoder() -> AutoencoderKLWan:
    """Build an untrained autoencoder of 2×2 patches, as Wan2.2's; its latents are 64 tokens for each of three times."""
    return AutoencoderKLWan(
        base_dim=32,
        z_dim=Z_DIM,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=8,
        latents_mean=[0.0] * Z_DIM,
        latents_std=[1.0] * Z_DIM,
    )


def build(autoencoder: AutoencoderKLWan) -> WanPipeline:
    """Build an untrained pipeline around a trained autoencoder."""
    training = (text for movement in moving.all_movements() if not movement.held_out for text in movement.phrasings())
    tokenizer = t5_tokenizer(TEXT_TOKENS, training)
    transformer = WanTransformer3DModel(
        patch_size=(1, 1, 1),
        num_attention_heads=4,
        attention_head_dim=32,
        in_channels=Z_DIM,
        out_channels=Z_DIM,
        text_dim=T5_WIDTH,
        freq_dim=64,
        ffn_dim=384,
        num_layers=6,
    )
    encoder = UMT5EncoderModel(UMT5Config(**t5_encoder(tokenizer).config.to_diff_dict()))
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=SHIFT)
    return WanPipeline(
        tokenizer=tokenizer, text_encoder=encoder, vae=autoencoder, scheduler=scheduler, transformer=transformer
    )


def _tokenize(pipeline: Any, texts: list[str]) -> Tokens:
    tokens = padded(pipeline.tokenizer, texts)
    return {"ids": tokens.input_ids, "mask": tokens.attention_mask}


def _encode(pipeline: Any, tokens: Tokens) -> Conditioning:
    states = pipeline.text_encoder(tokens["ids"], tokens["mask"]).last_hidden_state
    return {"states": torch.where(tokens["mask"][..., None].bool(), states, 0)}


WAN = Family(
    build_autoencoder=build_autoencoder,
    build=build,
    tokenize=_tokenize,
    encode=_encode,
    settings={"frames": moving.FRAMES, "quantize": [r"^blocks\."], "keep": [], "keep_max_dim": 0},
    time_shift=4.0,
    source=moving.MovingSource,
    accuracy=partial(measure.accuracy, held_out=moving.held_out, verify=verify_motions, kinds=moving.KINDS),
)
