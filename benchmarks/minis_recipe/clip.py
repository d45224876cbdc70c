"""The miniature CLIP, trained contrastively with hard negatives.

The hard negatives are captions that differ in one attribute, and generated images that do not show their caption.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from solrl_core.rewards.images import OPENAI_MEAN, OPENAI_STD, Normalize, as_uint8
from solrl_minis.scenes import SIDE
from solrl_minis.verifier import DetectedObject, find_objects
from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel, CLIPProcessor, CLIPTokenizer

from minis_recipe import preference
from minis_recipe.autoencoder import from_latents, to_latents
from minis_recipe.data import Source
from minis_recipe.loop import Budget, Rates, fit
from minis_recipe.meaning import Meaning, meaning_of_detections, meaning_of_scenes, meaning_of_texts
from minis_recipe.scenes import render
from minis_recipe.tokenizers import CLIP_TOKENS, corpus
from minis_recipe.world import Combination

HARD_NEGATIVES = 4
GROUPS = 8
"""Rendered images per generated group in a batch. A group has 4 images: half as many generated as rendered ones."""
RATES = Rates(1.5e-3, weight_decay=0.02, betas=(0.9, 0.98))
normalize = Normalize()
"""CLIP's mean and standard deviation, of images [N, 3, H, W] in [0, 1]."""


def build(tokenizer: CLIPTokenizer) -> CLIPModel:
    """Build an untrained CLIP of the shipped size."""
    common = {"hidden_size": 96, "intermediate_size": 288, "num_attention_heads": 4, "projection_dim": 96}
    return CLIPModel(
        CLIPConfig(
            text_config={
                **common,
                "vocab_size": len(tokenizer),
                "num_hidden_layers": 3,
                "max_position_embeddings": CLIP_TOKENS,
                "bos_token_id": tokenizer.bos_token_id,
                "eos_token_id": tokenizer.eos_token_id,
                "pad_token_id": tokenizer.pad_token_id,
            },
            vision_config={**common, "num_hidden_layers": 6, "image_size": SIDE, "patch_size": 8},
            projection_dim=96,
        )
    )


def processor(tokenizer: CLIPTokenizer) -> CLIPProcessor:
    """Processor of the miniature CLIP: 64 px, CLIP's mean and standard deviation."""
    images = CLIPImageProcessorPil(
        size={"shortest_edge": SIDE},
        crop_size={"height": SIDE, "width": SIDE},
        image_mean=OPENAI_MEAN,
        image_std=OPENAI_STD,
    )
    return CLIPProcessor(image_processor=images, tokenizer=tokenizer)


def tokens(tokenizer: Any, texts: list[str]) -> dict[str, torch.Tensor]:
    """Tokenize texts to ids and masks [N, 24]."""
    out = tokenizer(texts, padding="max_length", max_length=CLIP_TOKENS, truncation=True, return_tensors="pt")
    return {"input_ids": out.input_ids, "attention_mask": out.attention_mask}


@torch.no_grad()
def _degraded(images: torch.Tensor, autoencoder: Any) -> torch.Tensor:
    """Make images look generated: half pass through the autoencoder with noisy latents, all get some noise."""
    half = len(images) // 2
    latents = to_latents(autoencoder, images[:half])
    strength = 0.3 * torch.rand(half, 1, 1, 1, device=images.device)
    restored = from_latents(autoencoder, latents + strength * torch.randn_like(latents))
    return _noisy(torch.cat([restored, images[half:]]))


def _noisy(images: torch.Tensor) -> torch.Tensor:
    noise = 0.03 * torch.rand(len(images), 1, 1, 1, device=images.device)
    return (images + noise * torch.randn_like(images)).clamp(0, 1)


@dataclass(frozen=True)
class GeneratedGroups:
    """Images that the backbones generated from the captions of G combinations.

    Attributes:
        combinations: the G combinations.
        images: uint8 [G, 4, 3, 64, 64].
        shows: G · 4 codes of the objects detected in each image, which may differ from its caption.
    """

    combinations: list[Combination]
    images: torch.Tensor
    shows: Meaning


def generate(source: Source, folders: Sequence[Path], each: int, device: str) -> GeneratedGroups:
    """Generate images of `each` training combinations with each backbone in `folders`."""
    combinations, images = [], []
    for folder in folders:
        drawn = source.draw(each)
        combinations += drawn
        captions = [source.caption(c) for c in drawn]
        images.append(as_uint8(preference.generate(captions, source, folder, device)))
    pixels = torch.cat(images)
    detections = preference.in_processes(_detect, pixels.flatten(0, 1))
    return GeneratedGroups(combinations, pixels, meaning_of_detections(detections))


def _detect(images: torch.Tensor) -> list[list[DetectedObject]]:
    return [find_objects(image) for image in (images.float() / 255).numpy()]


def contrast(logits: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of each true pair against all false texts of its image and against all false images of its text.

    Args:
        logits: [images, texts].
        true: bool [images, texts], whether the text is true of the image; an image may have any number of true texts.
    """
    false = logits.masked_fill(true, float("-inf"))
    of_images, of_texts = (F.softplus(false.logsumexp(axis, keepdim=True) - logits)[true].mean() for axis in (1, 0))
    return (of_images + of_texts) / 2


def train(
    model: CLIPModel, tokenizer: CLIPTokenizer, autoencoder: Any, groups: GeneratedGroups, budget: Budget, device: str
) -> list[float]:
    """Train in place on rendered and autoencoded scenes of training combinations, and on generated images.

    Returns:
        The loss at each step.
    """
    model.to(device).train()
    source = Source(2)
    drawn = source.draw(budget.pool)
    scenes = source.scenes(drawn)
    pixels, shows = render(scenes, 0, device), meaning_of_scenes(scenes)
    generated, size = groups.images.to(device), groups.images.shape[1]
    texts = sorted(set(corpus()))
    row = {text: i for i, text in enumerate(texts)}
    table = {name: ids.to(device) for name, ids in tokens(tokenizer, texts).items()}

    def loss() -> tuple[torch.Tensor, torch.Tensor]:
        pick = source.rng.integers(len(drawn), size=budget.batch)
        group_pick = source.rng.integers(len(generated), size=max(1, budget.batch // GROUPS))
        images = torch.cat(
            [
                _degraded(pixels[torch.from_numpy(pick)], autoencoder),
                _noisy(generated[torch.from_numpy(group_pick)].flatten(0, 1).float() / 255),
            ]
        )
        shown = shows.rows(pick).join(groups.shows.rows((group_pick[:, None] * size + np.arange(size)).flatten()))
        combinations = [drawn[i] for i in pick] + [groups.combinations[i] for i in group_pick]
        captioned = combinations + [source.change(c) for c in combinations for _ in range(HARD_NEGATIVES)]
        rows = torch.tensor([row[source.caption(c)] for c in captioned])
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            image = model.get_image_features(pixel_values=normalize(images)).pooler_output
            text = model.get_text_features(**{name: values[rows] for name, values in table.items()}).pooler_output
        logits = F.normalize(image.float(), dim=-1) @ F.normalize(text.float(), dim=-1).T
        logits = logits * model.logit_scale.clamp(max=4.6052).exp()
        value = contrast(logits, meaning_of_texts(captioned).to(device).true_of(shown.to(device)))
        return value, value

    losses = fit("clip", list(model.parameters()), loss, budget, RATES)
    model.eval()
    return losses


@torch.no_grad()
def agreement(model: CLIPModel, tokenizer: CLIPTokenizer, device: str, pairs: int = 2000, seed: int = 9) -> float:
    """Share of held-out prompts for which the right image scores above one that differs in one attribute."""
    source = Source(seed, held_out=True)
    combinations = source.draw(pairs)
    right = source.images(combinations, device)
    wrong = source.images([source.change(c) for c in combinations], device)
    texts = tokens(tokenizer, [source.caption(c) for c in combinations])
    features = model.get_text_features(**{name: ids.to(device) for name, ids in texts.items()})
    text = F.normalize(features.pooler_output, dim=-1)
    better, worse = (
        (F.normalize(model.get_image_features(pixel_values=normalize(i)).pooler_output, dim=-1) * text).sum(-1)
        for i in (right, wrong)
    )
    return float((better > worse).float().mean())
