"""The miniature CLIP: contrastive, with hard negatives: captions that differ in one attribute, and generated images
of a caption that show something else, or nothing that has a name."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel, CLIPProcessor, CLIPTokenizer

from solrl_minis.recipe import preference
from solrl_minis.recipe.autoencoder import from_latents, to_latents
from solrl_minis.recipe.data import Meaning, Source, meaning_of_found, meaning_of_scenes, meaning_of_texts
from solrl_minis.recipe.loop import Budget, Rates, fit
from solrl_minis.recipe.tokenizers import CLIP_TOKENS, corpus
from solrl_minis.scenes import SIDE, render
from solrl_minis.verifier import Found, find_objects
from solrl_minis.world import Combination

HARD_NEGATIVES = 4
GROUPS = 8
"""Rendered images to one generated group of a batch, so half as many generated ones as rendered."""
RATES = Rates(1.5e-3, weight_decay=0.02, betas=(0.9, 0.98))
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def build(tokenizer: CLIPTokenizer) -> CLIPModel:
    """An untrained CLIP of the shipped shape."""
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
    """The processor that goes with it: 64 px, CLIP's mean and deviation."""
    images = CLIPImageProcessorPil(
        size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}, image_mean=MEAN, image_std=STD
    )
    return CLIPProcessor(image_processor=images, tokenizer=tokenizer)


def normalize(images: torch.Tensor) -> torch.Tensor:
    """CLIP's normalisation of [N, 3, H, W] in [0, 1]."""
    mean, std = (torch.tensor(v, device=images.device)[:, None, None] for v in (MEAN, STD))
    return (images - mean) / std


def tokens(tokenizer: Any, texts: list[str]) -> dict[str, torch.Tensor]:
    """Token ids and masks [N, 24]."""
    out = tokenizer(texts, padding="max_length", max_length=CLIP_TOKENS, truncation=True, return_tensors="pt")
    return {"input_ids": out.input_ids, "attention_mask": out.attention_mask}


@torch.no_grad()
def _worn(images: torch.Tensor, autoencoder: Any) -> torch.Tensor:
    """Images as a generator would make them: half through the autoencoder with noisy latents, all a bit noisy."""
    half = len(images) // 2
    latents = to_latents(autoencoder, images[:half])
    wear = 0.3 * torch.rand(half, 1, 1, 1, device=images.device)
    restored = from_latents(autoencoder, latents + wear * torch.randn_like(latents))
    return _noisy(torch.cat([restored, images[half:]]))


def _noisy(images: torch.Tensor) -> torch.Tensor:
    noise = 0.03 * torch.rand(len(images), 1, 1, 1, device=images.device)
    return (images + noise * torch.randn_like(images)).clamp(0, 1)


@dataclass(frozen=True)
class Made:
    """What the backbones made of some combinations' captions.

    Attributes:
        combinations: G of them.
        images: uint8 [G, 4, 3, 64, 64].
        shows: what can be made out in each, which need not be what its caption says: G · 4 codes.
    """

    combinations: list[Combination]
    images: torch.Tensor
    shows: Meaning


def made(source: Source, folders: Sequence[Path], each: int, device: str) -> Made:
    """`each` training combinations by each of the backbones in `folders`."""
    combinations, images = [], []
    for folder in folders:
        drawn = source.draw(each)
        combinations += drawn
        images.append(preference.in_bytes(preference.made([source.caption(c) for c in drawn], source, folder, device)))
    pixels = torch.cat(images)
    return Made(combinations, pixels, meaning_of_found(preference.in_processes(_found, pixels.flatten(0, 1))))


def _found(images: torch.Tensor) -> list[list[Found]]:
    return [find_objects(image) for image in (images.float() / 255).numpy()]


def contrast(logits: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of every true pair against all that is false of its image, and against all false of its text.

    Args:
        logits: [images, texts].
        true: bool, the same shape: whether the text is true of the image. Any image may have several, or none.
    """
    false = logits.masked_fill(true, float("-inf"))
    of_images, of_texts = (F.softplus(false.logsumexp(axis, keepdim=True) - logits)[true].mean() for axis in (1, 0))
    return (of_images + of_texts) / 2


def train(
    model: CLIPModel, tokenizer: CLIPTokenizer, autoencoder: Any, seen: Made, budget: Budget, device: str
) -> list[float]:
    """Train in place on rendered and autoencoded scenes of training combinations, and on what the backbones made.

    Returns:
        The loss at each step.
    """
    model.to(device).train()
    source = Source(2)
    drawn = source.draw(budget.pool)
    scenes = source.scenes(drawn)
    pixels, shows = render(scenes, 0, device), meaning_of_scenes(scenes)
    generated, size = seen.images.to(device), seen.images.shape[1]
    texts = sorted(set(corpus()))
    row = {text: i for i, text in enumerate(texts)}
    table = {name: ids.to(device) for name, ids in tokens(tokenizer, texts).items()}

    def loss() -> tuple[torch.Tensor, torch.Tensor]:
        pick = source.rng.integers(len(drawn), size=budget.batch)
        groups = source.rng.integers(len(generated), size=max(1, budget.batch // GROUPS))
        images = torch.cat(
            [
                _worn(pixels[torch.from_numpy(pick)], autoencoder),
                _noisy(generated[torch.from_numpy(groups)].flatten(0, 1).float() / 255),
            ]
        )
        shown = shows.rows(pick).join(seen.shows.rows((groups[:, None] * size + np.arange(size)).flatten()))
        combinations = [drawn[i] for i in pick] + [seen.combinations[i] for i in groups]
        said_of = combinations + [source.change(c) for c in combinations for _ in range(HARD_NEGATIVES)]
        rows = torch.tensor([row[source.caption(c)] for c in said_of])
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            found = model.get_image_features(pixel_values=normalize(images)).pooler_output
            said = model.get_text_features(**{name: values[rows] for name, values in table.items()}).pooler_output
        logits = F.normalize(found.float(), dim=-1) @ F.normalize(said.float(), dim=-1).T
        logits = logits * model.logit_scale.clamp(max=4.6052).exp()
        value = contrast(logits, meaning_of_texts(said_of).to(device).true_of(shown.to(device)))
        return value, value

    losses = fit("clip", list(model.parameters()), loss, budget, RATES)
    model.eval()
    return losses


@torch.no_grad()
def agreement(model: CLIPModel, tokenizer: CLIPTokenizer, device: str, pairs: int = 2000, seed: int = 9) -> float:
    """Share of held-out prompts for which the right image beats one that differs in one attribute."""
    source = Source(seed, held_out=True)
    combinations = source.draw(pairs)
    right = source.images(combinations, device)
    wrong = source.images([source.change(c) for c in combinations], device)
    texts = tokens(tokenizer, [source.caption(c) for c in combinations])
    said = model.get_text_features(**{name: ids.to(device) for name, ids in texts.items()})
    text = F.normalize(said.pooler_output, dim=-1)
    better, worse = (
        (F.normalize(model.get_image_features(pixel_values=normalize(i)).pooler_output, dim=-1) * text).sum(-1)
        for i in (right, wrong)
    )
    return float((better > worse).float().mean())
