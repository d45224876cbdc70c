"""Shift of scores between rewards in float32 and in bfloat16: `python benchmarks/reward_dtype.py`.

A service's rewards have BF16 weights on a GPU, a trainer's float32. Scores the same candidates of each miniature with
both. Writes docs/results/reward_dtype.{json,md}.
"""

import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from byte_images import STEPS, shifts
from rank_tables import Row, command, options, run
from solrl_core.families import load_backbone
from solrl_core.generator import Generator
from solrl_core.rewards import RewardSet
from solrl_proto.noise import expand_seeds
from solrl_proto.selection import best_worst
from solrl_trainer.prompts import find_prompts, read_prompts

NAME = "reward_dtype"
KEEP = 24
PARSER = options(__doc__, prompts=4)


def measure(model: str, args: Namespace) -> list[Row]:
    """Measure one model; a row per reward."""
    backbone = load_backbone(model, device=args.device)
    generator = Generator(backbone, "bf16")
    sets = [RewardSet.load(args.rewards, backbone, dtype=dtype) for dtype in ("float32", "bfloat16")]
    found: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {name: [] for name in args.rewards}
    for prompt in read_prompts(find_prompts("shapes"), "test")[: args.prompts]:
        images = generator.generate(prompt.text, expand_seeds(0, prompt.id, args.candidates), steps=STEPS).images
        texts, metadata = [prompt.text] * len(images), [prompt.metadata] * len(images)
        wide, narrow = (rewards.score(args.rewards, images, texts, metadata) for rewards in sets)
        for name, pairs in found.items():
            pairs.append((wide[name].cpu(), narrow[name].cpu()))
    return [
        {"model": model, "reward": name, **shifts(pairs), "same_selection": same_selection(pairs)}
        for name, pairs in found.items()
    ]


def same_selection(groups: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Share of the best and worst that both scores [candidates] of a group select, mean over groups."""
    shares = [len({*best_worst(one, KEEP)} & {*best_worst(other, KEEP)}) / KEEP for one, other in groups]
    return sum(shares) / len(shares)


def table(rows: Sequence[Row], settings: Mapping[str, Any]) -> str:
    """Markdown page of all rows."""
    lines = [
        "# Scores of rewards in float32 and in BF16",
        "",
        f"By `{command(NAME, PARSER, settings)}`, on the device `{settings['device']}`: {settings['prompts']} held-out",
        f"prompts × {settings['candidates']} candidates in BF16 at {STEPS} steps, scored by rewards with float32 and",
        "with BF16 weights. *sd* is the standard deviation of a group's scores. Same selection: share of the",
        f"{KEEP // 2} best and {KEEP // 2} worst that both select.",
        "",
        "| model | reward | largest, sd | mean, sd | Spearman in a group, mean | lowest | same selection |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['model']} | {row['reward']} | {row['largest_sd']:.3f} | {row['mean_sd']:.4f} "
        f"| {row['spearman']:.5f} | {row['lowest_spearman']:.5f} | {row['same_selection']:.1%} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    run(NAME, PARSER, measure, table)
