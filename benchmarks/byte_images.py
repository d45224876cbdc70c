"""Shift of scores between float and 8-bit images: `python benchmarks/byte_images.py`.

A reward server gets images rounded to 8 bits, a reward in the same process float32. Scores the same candidates of each
miniature with each reward from both. Writes docs/results/byte_images.{json,md}.
"""

import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from rank_tables import Row, command, options, run
from scipy.stats import spearmanr
from solrl_core.families import load_backbone
from solrl_core.generator import Generator
from solrl_core.rewards import RewardSet
from solrl_core.rewards.images import as_floats, as_uint8
from solrl_proto.noise import expand_seeds
from solrl_trainer.prompts import find_prompts, read_prompts

NAME = "byte_images"
STEPS = 10
PARSER = options(__doc__, prompts=4)


def measure(model: str, args: Namespace) -> list[Row]:
    """Measure one model; a row per reward."""
    backbone = load_backbone(model, device=args.device)
    rewards, generator = RewardSet.load(args.rewards, backbone), Generator(backbone, "bf16")
    found: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {name: [] for name in args.rewards}
    for prompt in read_prompts(find_prompts("shapes"), "test")[: args.prompts]:
        images = generator.generate(prompt.text, expand_seeds(0, prompt.id, args.candidates), steps=STEPS).images
        texts, metadata = [prompt.text] * len(images), [prompt.metadata] * len(images)
        floats, eights = (
            rewards.score(args.rewards, one, texts, metadata) for one in (images, as_floats(as_uint8(images)))
        )
        for name, pairs in found.items():
            pairs.append((floats[name], eights[name]))
    return [{"model": model, "reward": name, **shifts(pairs)} for name, pairs in found.items()]


def shifts(groups: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, float]:
    """Shifts of scores [candidates] from floats to bytes over all groups; ranks are compared within each group."""
    moved = torch.cat([(floats - eights).abs() for floats, eights in groups])
    ranks = [float(spearmanr(floats, eights).statistic) for floats, eights in groups]
    return {
        "largest": float(moved.max()),
        "mean": float(moved.mean()),
        "largest_sd": max(float((floats - eights).abs().max() / floats.std()) for floats, eights in groups),
        "mean_sd": sum(float((floats - eights).abs().mean() / floats.std()) for floats, eights in groups) / len(groups),
        "spearman": sum(ranks) / len(ranks),
        "lowest_spearman": min(ranks),
    }


def table(rows: Sequence[Row], settings: Mapping[str, Any]) -> str:
    """Markdown page of all rows."""
    lines = [
        "# Scores of float and of 8-bit images",
        "",
        f"By `{command(NAME, PARSER, settings)}`, on the device `{settings['device']}`: {settings['prompts']} held-out",
        f"prompts × {settings['candidates']} candidates in BF16 at {STEPS} steps, scored from float32 and from images",
        "rounded to 8 bits, as a reward server gets them. *sd* is the standard deviation of a group's scores.",
        "PickScore and ImageReward round to 8 bits themselves, as their packages do.",
        "",
        "| model | reward | largest shift | mean shift | largest, sd | mean, sd | Spearman in a group, mean | lowest |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['model']} | {row['reward']} | {row['largest']:.1e} | {row['mean']:.1e} | {row['largest_sd']:.3f} "
        f"| {row['mean_sd']:.4f} | {row['spearman']:.5f} | {row['lowest_spearman']:.5f} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    run(NAME, PARSER, measure, table)
