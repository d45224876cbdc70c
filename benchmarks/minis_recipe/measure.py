"""Evaluation of a trained backbone: accuracy on held-out prompts, and rank fidelity at four bits."""

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from solrl_core.families import Backbone, load_backbone
from solrl_core.fidelity import rank_fidelity
from solrl_core.precision.layer_policy import apply_policy
from solrl_core.rewards import load_reward
from solrl_core.sampling.noise import initial_noise
from solrl_core.sampling.sampler import solve
from solrl_minis.catalog import prompts
from solrl_minis.verifier import verify_batch
from solrl_proto.noise import expand_seeds
from solrl_proto.text_files import read_lines

from minis_recipe.world import KINDS

SEEDS, STEPS, EXPLORE_STEPS, CANDIDATES = 4, 10, 6, 96
BATCH = 256


@torch.no_grad()
def sample(
    backbone: Backbone,
    texts: Sequence[str],
    seeds: Sequence[int],
    steps: int,
    transformer: torch.nn.Module | None = None,
    guidance: float = 1.0,
) -> torch.Tensor:
    """Sample images with Euler steps, in batches.

    Args:
        backbone: the model.
        texts: one prompt per candidate.
        seeds: one seed per candidate.
        steps: number of solver steps.
        transformer: used instead of the backbone's own.
        guidance: scale of classifier-free guidance; 1 is without.

    Returns:
        [N, 3, 64, 64] in [0, 1], on the CPU.
    """
    images = []
    for start in range(0, len(seeds), BATCH):
        rows = slice(start, start + BATCH)
        conditioning = backbone.encode(texts[rows], guidance)

        def velocity(x: torch.Tensor, sigma: float, conditioning: Any = conditioning) -> torch.Tensor:
            at = torch.full((len(x),), sigma, device=backbone.device)
            return backbone.velocity(transformer or backbone.transformer, x, at, conditioning, guidance)

        noise = initial_noise(seeds[rows], backbone.latent_shape).to(backbone.device)
        images.append(backbone.decode(solve(velocity, noise, backbone.sigmas(steps))).cpu())
    return torch.cat(images)


def held_out(count: int | None = None) -> list[dict[str, Any]]:
    """First `count` shipped held-out prompts with their metadata; all if None."""
    return [json.loads(line) for line in read_lines(prompts() / "test_metadata.jsonl")[:count]]


def accuracy(
    backbone: Backbone,
    count: int | None = None,
    *,
    held_out: Callable[[int | None], list[dict[str, Any]]] = held_out,
    verify: Callable[[torch.Tensor, Sequence[Mapping[str, Any]]], Sequence[Any]] = verify_batch,
    kinds: Sequence[str] = KINDS,
) -> tuple[dict[str, Any], torch.Tensor]:
    """Accuracy over 4 images of each held-out prompt at 10 steps. Returns the figures and the images.

    Args:
        backbone: the model.
        count: number of prompts; all if None.
        held_out: the first prompts of its world, with their metadata.
        verify: of that world; its verdicts have `strict` and `graded`, each 0 to 1.
        kinds: of its contents.
    """
    pairs = [(item, seed) for item in held_out(count) for seed in expand_seeds(1, item["prompt"], SEEDS)]
    images = sample(backbone, [item["prompt"] for item, _ in pairs], [seed for _, seed in pairs], STEPS)
    verdicts = verify(images, [item for item, _ in pairs])
    by_kind: dict[str, list[float]] = {kind: [] for kind in kinds}
    for (item, _), verdict in zip(pairs, verdicts, strict=True):
        by_kind[item["tag"]].append(verdict.strict)
    figures = {
        "strict": sum(verdict.strict for verdict in verdicts) / len(verdicts),
        "graded": sum(verdict.graded for verdict in verdicts) / len(verdicts),
        "kinds": {kind: sum(v) / len(v) for kind, v in by_kind.items() if v},
        "images": len(verdicts),
    }
    return figures, images


def fidelity(backbone: Backbone, reward: str = "clipscore", count: int = 16) -> dict[str, Any]:
    """Rank correlation of BF16 and NVFP4 at 6 steps with BF16 at 10 steps, over 96 candidates per held-out prompt."""
    score = load_reward(reward, backbone)
    quantized = copy.deepcopy(backbone.transformer)
    apply_policy(quantized, backbone.policy)
    plans = {"true": (None, STEPS), "bf16": (None, EXPLORE_STEPS), "nvfp4": (quantized, EXPLORE_STEPS)}
    rewards: dict[str, list[torch.Tensor]] = {name: [] for name in plans}
    for item in held_out(count):
        texts, seeds = [item["prompt"]] * CANDIDATES, expand_seeds(0, item["prompt"], CANDIDATES)
        for name, (transformer, steps) in plans.items():
            images = sample(backbone, texts, seeds, steps, transformer)
            rewards[name].append(score(images, texts, [item] * CANDIDATES).float().cpu())
    true = torch.stack(rewards.pop("true"))
    figures = {f"spearman_{name}": rank_fidelity(torch.stack(found), true).spearman for name, found in rewards.items()}
    return {**figures, "reward": reward, "prompts": count, "candidates": CANDIDATES}


def load(folder: Path, device: str) -> Backbone:
    """Load a miniature from its folder, as the service does."""
    return load_backbone(str(folder), device=device)
