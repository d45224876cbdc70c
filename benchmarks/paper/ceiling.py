"""The ceiling of a reward: true scenes of the held-out prompts, as a perfect miniature would show them.

Each prompt's scenes are rendered from its metadata and pass through the miniature's autoencoder, and every reward
scores them. Scores are stored beside the finished runs; `python benchmarks/paper --ceiling` measures them again.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from minis_recipe.autoencoder import from_latents, to_latents
from minis_recipe.scenes import render, sample_scenes
from minis_recipe.world import Combination
from solrl_core.families import load_backbone
from solrl_core.rewards import RewardSet
from solrl_trainer.prompts.prompt_sets import find_prompts, read_prompts

from paper.experiments import RESULTS
from paper.intervals import Values

STORED = Path("paper/ceiling.json")
SCENES = 4
SEED = 0


def ceiling_of(model: str, prompts: Sequence[str], results: Path = RESULTS) -> dict[str, Values]:
    """Reward → mean score of true scenes by prompt [prompts]; {} for a model or prompts that were not measured."""
    stored = json.loads((results / STORED).read_text()) if (results / STORED).is_file() else {}
    found = stored.get(model)
    if found is None or found["prompts"] != list(prompts):
        return {}
    return {name: np.array(scores, dtype=np.float64) for name, scores in found["scores"].items()}


def measure_ceiling(model: str, names: Sequence[str], count: int, out: Path) -> None:
    """Score true scenes of the first `count` held-out prompts of a miniature, and store them in `out`."""
    backbone = load_backbone(model)
    rewards, autoencoder = RewardSet.load(names, backbone), backbone.parts["vae"]
    prompts = read_prompts(find_prompts("shapes"), "test")[:count]
    repeated = [prompt for prompt in prompts for _ in range(SCENES)]
    scenes = sample_scenes([_combination(prompt.metadata) for prompt in repeated], np.random.default_rng(SEED))
    with torch.no_grad():
        images = from_latents(autoencoder, to_latents(autoencoder, render(scenes, SEED))).clamp(0, 1)
    scores = rewards.score(names, images, [one.text for one in repeated], [one.metadata for one in repeated])
    path = out / STORED
    stored = json.loads(path.read_text()) if path.is_file() else {}
    stored[model] = {
        "prompts": [prompt.text for prompt in prompts],
        "scores": {
            name: [round(float(one), 5) for one in values.double().view(-1, SCENES).mean(1)]
            for name, values in scores.items()
        },
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(stored) + "\n")


def _combination(metadata: dict) -> Combination:
    include = metadata["include"]
    things = tuple((one["color"], one["class"]) for one in include)
    relation = include[-1]["position"][0] if "position" in include[-1] else None
    return Combination(metadata["tag"], things, include[0]["count"], relation, include[0].get("size"))
