"""How well cheap exploration ranks candidates: `python benchmarks/rank_fidelity.py [--prompts 64]`.

On held-out prompts, the rewards of NVFP4 at 6 steps and of BF16 at 6 steps (the ceiling that quantisation can reach)
are each compared with those of BF16 at 10 steps, over 96 candidates a prompt from the same seeds.
"""

import argparse
import json
import os
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from solrl_core.families import load_backbone
from solrl_core.fidelity import rank_fidelity
from solrl_core.generator import Generator
from solrl_core.rewards import RewardSet
from solrl_proto.noise import expand_seeds
from solrl_trainer.prompts import find_prompts, read_prompts


def main() -> None:
    """Measure, print the table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="mini-sana")
    parser.add_argument("--reward", default="clipscore")
    parser.add_argument("--prompt-set", default="shapes")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--candidates", type=int, default=96)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("docs/results/rank_fidelity.json"))
    args = parser.parse_args()

    backbone = load_backbone(args.model, device=args.device)
    rewards = RewardSet.load([args.reward], backbone)
    bf16, nvfp4 = Generator(backbone, "bf16"), Generator(backbone, "nvfp4")
    plans = {"BF16, 10 steps": (bf16, 10), "BF16, 6 steps": (bf16, 6), "NVFP4, 6 steps": (nvfp4, 6)}
    scores: dict[str, list[torch.Tensor]] = {name: [] for name in plans}
    prompts = read_prompts(find_prompts(args.prompt_set), "test")[: args.prompts]
    for prompt in track(prompts, "groups", console=Console(stderr=True)):
        seeds = expand_seeds(0, prompt.id, args.candidates)
        for name, (generator, steps) in plans.items():
            images = generator.generate(prompt.text, seeds, steps=steps).images
            count = len(seeds)
            scored = rewards.score([args.reward], images, [prompt.text] * count, [prompt.metadata] * count)
            scores[name].append(scored[args.reward])

    true = torch.stack(scores.pop("BF16, 10 steps"))
    table = Table("against BF16, 10 steps", "Spearman", "Kendall", "overlap 4/8/12 best", "worst", "true ranks")
    results = {}
    for name, parts in scores.items():
        fidelity = rank_fidelity(torch.stack(parts), true)
        results[name] = vars(fidelity)
        overlaps = (fidelity.top_overlap, fidelity.bottom_overlap)
        best, worst = ("/".join(f"{value:.2f}" for value in overlap.values()) for overlap in overlaps)
        ranks = f"{fidelity.top_rank:.1f} / {fidelity.bottom_rank:.1f}"
        table.add_row(name, f"{fidelity.spearman:.3f}", f"{fidelity.kendall:.3f}", best, worst, ranks)
    Console().print(table)
    share = nvfp4.quantized_share
    print(f"{args.model}, {args.reward}, {len(prompts)} prompts × {args.candidates} candidates")
    print(f"{share:.1%} of the blocks' linear FLOPs in NVFP4")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    settings = {key: value for key, value in vars(args).items() if key != "out"}
    args.out.write_text(json.dumps({**settings, "quantized_share": share, **results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
