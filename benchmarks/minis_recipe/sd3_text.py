"""The miniature Stable Diffusion 3 of the text world: characters as text tokens, 32 image tokens of 8×8 pixels."""

from dataclasses import replace

from diffusers import AutoencoderKL, StableDiffusion3Pipeline
from torch import nn

from minis_recipe.family import TEXT_TOKENS
from minis_recipe.reading import accuracy
from minis_recipe.sd3 import SD3, assemble
from minis_recipe.tokenizers import clip_character_tokenizer, t5_tokenizer
from minis_recipe.words import HEIGHT, INKS, WIDTH, WordSource


def build(autoencoder: AutoencoderKL) -> StableDiffusion3Pipeline:
    """Build an untrained pipeline of the shipped size around a trained autoencoder."""
    clip, t5 = clip_character_tokenizer(TEXT_TOKENS), t5_tokenizer(TEXT_TOKENS, [f"in {ink}" for ink in INKS])
    pipeline = assemble(autoencoder, clip, t5, layers=3, heads=3, patch=2)
    for encoder in (pipeline.text_encoder, pipeline.text_encoder_2):
        for embedding in encoder.modules():
            if isinstance(embedding, nn.Embedding):
                nn.init.normal_(embedding.weight)
    return pipeline


SD3_TEXT = replace(
    SD3,
    build=build,
    settings={
        **SD3.settings,
        "height": HEIGHT,
        "width": WIDTH,
        # As of mini-sd3, whose fourth block is its last.
        "keep": [r"\.norm1\.", r"^transformer_blocks\.[12]\.attn\.to_out\.", r"^transformer_blocks\.2\.ff\.net\.2$"],
        "rewards": {"ocr": {"line": True}},
    },
    frozen_text=True,
    source=WordSource,
    accuracy=accuracy,
)
