"""Dependence of a candidate on the rest of its batch: `python benchmarks/batch_dependence.py --device cuda`.

Generates the same seeds one at a time, and in batches of up to 24, at every precision of the device. All images are
scored together, so that only generating differs. Writes docs/results/batch_dependence.{json,md}; results of another
device stay.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from solrl_core.families import Backbone, load_backbone
from solrl_core.generator import Generator
from solrl_core.precision import numerics, supported_tiers
from solrl_core.rewards import RewardSet
from solrl_proto.identifiers import Tier
from solrl_proto.noise import expand_seeds
from solrl_proto.rollouts import PromptItem
from solrl_trainer.prompts import find_prompts, read_prompts

MODELS = ("mini-sana", "mini-sd3", "mini-flux")
REWARD, STEPS, BEST = "clipscore", 6, 12


def main() -> None:
    """Measure, print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--candidates", type=int, default=60)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    args = parser.parse_args()
    device = "CPU" if args.device == "cpu" else torch.cuda.get_device_name()
    file = args.out / "batch_dependence.json"
    rows = json.loads(file.read_text())["rows"] if file.is_file() else []
    rows = [row for row in rows if row["device"] != device or row["model"] not in args.models]
    prompts = read_prompts(find_prompts("shapes"), "test")[: args.prompts]
    for model in args.models:
        backbone = load_backbone(model, device=args.device)
        rewards = RewardSet.load([REWARD], backbone)
        for precision in supported_tiers(backbone.device):
            found = measure(backbone, precision, rewards, prompts, args.candidates)
            rows.append({"device": device, "model": model, "precision": precision, **found})
    args.out.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
    (args.out / "batch_dependence.md").write_text(table(rows))
    print(table(rows))


def measure(
    backbone: Backbone, precision: Tier, rewards: RewardSet, prompts: list[PromptItem], count: int
) -> dict[str, Any]:
    """Candidates alone against candidates in batches: differences of latents and of scores."""
    generator = Generator(backbone, precision)
    differ, apart, moved, kept = 0, 0.0, 0.0, []
    for prompt in prompts:
        seeds = expand_seeds(0, prompt.id, count)
        alone = [generator.generate(prompt.text, [seed], steps=STEPS) for seed in seeds]
        together = generator.generate(prompt.text, seeds, steps=STEPS)
        ours, theirs = torch.cat([one.trajectory.x for one in alone]).float(), together.trajectory.x.float()
        differ += int((ours != theirs).flatten(1).any(1).sum())
        norms = (ours - theirs).flatten(1).norm(dim=1) / theirs.flatten(1).norm(dim=1)
        apart = max(apart, float(norms.max()))
        images = torch.cat([*(one.images for one in alone), together.images])
        texts, metadata = [prompt.text] * len(images), [prompt.metadata] * len(images)
        ours, theirs = rewards.score([REWARD], images, texts, metadata)[REWARD].chunk(2)
        moved = max(moved, float((ours - theirs).abs().max() / theirs.std()))
        kept.append(len(set(ours.topk(BEST).indices.tolist()) & set(theirs.topk(BEST).indices.tolist())) / BEST)
    return {
        "numerics": numerics(precision, backbone.device),
        "candidates": count * len(prompts),
        "differ": differ,
        "latents": apart,
        "score_sd": moved,
        "best_kept": sum(kept) / len(kept),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown page."""
    lines = [
        "# Dependence of a candidate on the rest of its batch",
        "",
        "By `python benchmarks/batch_dependence.py --device …`: candidates one at a time, and in batches of up to 24,",
        f"{STEPS} Euler steps, {REWARD}. *Latents*: the largest relative difference of a candidate's latents. *Score*:",
        "the largest difference in standard deviations of the prompt's scores.",
        "",
        f"| device | model | precision | candidates that differ | latents | score, sd | best {BEST} in common |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['device']} | {r['model']} | {r['precision']}, {r['numerics']} | {r['differ']} of {r['candidates']} "
        f"| {r['latents']:.1e} | {r['score_sd']:.4f} | {r['best_kept']:.0%} |"
        for r in rows
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
