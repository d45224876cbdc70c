"""What pruning costs in fidelity: `python benchmarks/plan_fidelity.py [--device cuda] [--models mini-sana …]`.

NVFP4 at 6 steps against BF16 at 10, over held-out prompts × 96 candidates, with all rewards scored on the same images.
A candidate does not depend on its batch-mates, so one pass, scored after some of its steps too, tells what every plan
would have kept; really pruned groups are compared with that. Scores lie in runs/plan_fidelity, and the command goes on
where it was stopped. Writes docs/results/plan_fidelity.{json,md,png}.
"""

import argparse
import itertools
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from plan_fidelity_plot import write_plot
from rich.console import Console
from rich.progress import track
from safetensors.torch import load_file, save_file
from solrl_core.families import load_backbone
from solrl_core.fidelity import rank_fidelity
from solrl_core.generator import Generator
from solrl_core.rewards import RewardSet
from solrl_core.selection import best_worst
from solrl_minis.world import sample_prompts
from solrl_proto.noise import expand_seeds
from solrl_proto.rollouts import Plan, PromptItem, Prune
from solrl_trainer.calibrate import score_group
from solrl_trainer.evaluate import paired_gain
from solrl_trainer.presets import resolve
from solrl_trainer.prompts import read_prompts

MODELS = ("mini-sana", "mini-sd3", "mini-flux")
REWARDS = ("clipscore", "pickscore", "hpsv2", "imagereward")
TRUE_STEPS, STEPS = 10, 6
AFTER = (2, 3, 4)
KEEP = (24, 32, 48, 64, 80)
ALLOWED = 1.0
"""By how much the mean true rank of the best and of the worst 12 may be worse than without pruning."""
CHECKED = 2
"""Prompts whose group is really pruned as well."""
SAVED_EVERY = 16

Scores = dict[str, torch.Tensor]
"""float32 [prompts, rewards, candidates]: "true", "final", and "2" … of what is predicted after so many steps;
"off" [prompts checked, plans]: see `really_pruned`."""


def main() -> None:
    """Measure what is missing, print the table, write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--candidates", type=int, default=96)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--scores", type=Path, default=Path("runs/plan_fidelity"))
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    args = parser.parse_args()
    prompts = held_out(args.prompts)
    found = {
        model: measure(model, prompts, args.candidates, args.device, args.scores / f"{model}.safetensors")
        for model in args.models
    }
    rows = [row for model, scores in found.items() for row in judge(model, scores)]
    off = {model: float(scores["off"].max()) for model, scores in found.items()}
    args.out.mkdir(parents=True, exist_ok=True)
    settings = {key: getattr(args, key) for key in ("models", "prompts", "candidates", "device")}
    (args.out / "plan_fidelity.json").write_text(json.dumps({**settings, "off": off, "rows": rows}, indent=1) + "\n")
    text = table(rows, off, args.prompts, args.candidates)
    (args.out / "plan_fidelity.md").write_text(text)
    write_plot(rows, ALLOWED, args.out / "plan_fidelity.png")
    print(text)


def held_out(count: int) -> list[PromptItem]:
    """Held-out prompts of the shapes world: the shipped 128 first, then more that were held out with them."""
    with tempfile.TemporaryDirectory() as folder:
        lines = [json.dumps(prompt) for prompt in sample_prompts(held_out=True, count=count, seed=0)]
        (Path(folder) / "test_metadata.jsonl").write_text("\n".join(lines))
        return read_prompts(Path(folder), "test")


def measure(model: str, prompts: Sequence[PromptItem], candidates: int, device: str, file: Path) -> Scores:
    """The scores of one model's groups; continues those in `file`, and keeps them there."""
    scores: Scores = load_file(file) if file.is_file() else {}
    begun = len(scores["true"]) if scores else 0
    if begun >= len(prompts):
        return scores
    file.parent.mkdir(parents=True, exist_ok=True)
    backbone = load_backbone(model, device=device)
    rewards = RewardSet.load(REWARDS, backbone)
    true, proxy = Generator(backbone, "bf16"), Generator(backbone, "nvfp4")
    for index, prompt in enumerate(track(prompts[begun:], f"{model}, groups", console=Console(stderr=True)), begun + 1):
        seeds = expand_seeds(0, prompt.id, candidates)
        new = score(prompt, seeds, true, proxy, rewards)
        if index <= CHECKED:
            new["off"] = torch.tensor(really_pruned(model, prompt, seeds, new, proxy, rewards))
        scores |= {key: torch.cat([*([scores[key]] if key in scores else []), part[None]]) for key, part in new.items()}
        if index % SAVED_EVERY == 0 or index == len(prompts):
            # Under another name first, so that what was saved before outlives a stop in between.
            partial = file.with_suffix(".partial")
            save_file(scores, partial)
            partial.replace(file)
    return scores


def score(
    prompt: PromptItem, seeds: Sequence[int], true: Generator, proxy: Generator, rewards: RewardSet
) -> dict[str, torch.Tensor]:
    """One group's [rewards, candidates], under the keys of `Scores`."""

    def scored(images: torch.Tensor) -> torch.Tensor:
        each = rewards.score(REWARDS, images, [prompt.text] * len(seeds), [prompt.metadata] * len(seeds))
        return torch.stack([each[name] for name in REWARDS])

    found = {"true": scored(true.generate(prompt.text, seeds, steps=TRUE_STEPS).images)}
    trajectory = None
    for until in (*AFTER, STEPS):
        made = proxy.generate(prompt.text, seeds, steps=STEPS, begin=trajectory, until=until)
        trajectory = made.trajectory
        found["final" if until == STEPS else str(until)] = scored(made.images)
    return found


def pruned(halfway: torch.Tensor, final: torch.Tensor, keep: int) -> torch.Tensor:
    """Scores [candidates] as a plan gives them that keeps the `keep` most extreme halfway: NaN for the others."""
    scores = torch.full_like(final, torch.nan)
    places = best_worst(halfway, keep)
    scores[places] = final[places]
    return scores


def really_pruned(
    model: str,
    prompt: PromptItem,
    seeds: Sequence[int],
    scores: Scores,
    proxy: Generator,
    rewards: RewardSet,
) -> list[float]:
    """Prune as the product does: for each plan, how far a score is off at most, in standard deviations of the group.

    A candidate that only one of the two keeps counts as wholly off (inf).
    """
    config = resolve(f"{model}/sol_rl/{REWARDS[0]}").config
    found = []
    for after, keep in grid(len(seeds)):
        plan = Plan(steps=STEPS, precision="nvfp4", prune=Prune(after=after, keep=keep))
        product = score_group(proxy, rewards, config, plan, prompt, seeds)
        ours = pruned(scores[str(after)][0], scores["final"][0], keep)
        same = bool((product.isnan() == ours.isnan()).all())
        found.append(float((product - ours).nan_to_num().abs().max() / scores["final"][0].std()) if same else torch.inf)
    return found


def grid(candidates: int) -> list[tuple[int, int]]:
    """(after, keep) of every plan that prunes."""
    return [(after, keep) for after, keep in itertools.product(AFTER, KEEP) if keep < candidates]


def judge(model: str, scores: Scores) -> list[dict[str, Any]]:
    """A row for each reward and plan, the unpruned one first."""
    candidates = scores["true"].shape[2]
    rows = []
    for at, reward in enumerate(REWARDS):
        true, final = scores["true"][:, at], scores["final"][:, at]
        whole = ranks(final, true)
        for after, keep in [(STEPS, candidates), *grid(candidates)]:
            halves = final if after == STEPS else scores[str(after)][:, at]
            proxy = torch.stack([pruned(h, f, keep) for h, f in zip(halves, final, strict=True)])
            found, worse = ranks(proxy, true), {}
            for half, sign in (("top", 1), ("bottom", -1)):
                worse[half] = paired_gain(sign * whole[half][:, None], sign * found[half][:, None])
            rows.append(
                {
                    "model": model,
                    "reward": reward,
                    "after": after,
                    "keep": keep,
                    "cost": (after * candidates + (STEPS - after) * keep) / (STEPS * candidates),
                    "top_rank": float(found["top"].mean()),
                    "bottom_rank": float(found["bottom"].mean()),
                    "worse": worse,
                    "spearman": float(found["spearman"].nanmean()),
                    "within": all(mean <= ALLOWED for mean, _, _ in worse.values()),
                    "surely_within": all(high <= ALLOWED for _, _, high in worse.values()),
                }
            )
    return rows


def ranks(proxy: torch.Tensor, true: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of each group: mean true rank of the proxy's best and worst 12, and Spearman over those not pruned."""
    each = [rank_fidelity(p[None], t[None]) for p, t in zip(proxy, true, strict=True)]
    return {
        "top": torch.tensor([one.top_rank for one in each]),
        "bottom": torch.tensor([one.bottom_rank for one in each]),
        "spearman": torch.tensor([one.spearman for one in each]),
    }


def table(rows: Sequence[dict[str, Any]], off: dict[str, float], prompts: int, candidates: int) -> str:
    """Every plan over all models and rewards, then every row."""
    lines = [
        "# What pruning costs in fidelity",
        "",
        f"By `python benchmarks/plan_fidelity.py`: NVFP4 at {STEPS} steps against BF16 at {TRUE_STEPS}, {prompts}",
        f"held-out prompts × {candidates} candidates. A plan keeps the most extreme by the reward of what is predicted",
        "after some of its steps. Worse: by how much the mean true rank of the 12 that it takes for the best (worst)",
        "is worse than without pruning, paired over prompts, with its 95 % interval. Steps: candidate steps spent,",
        "where all are 100 %; decoding and scoring halfway is not in it, and comes once for every candidate.",
        "",
        f"| plan | steps | worse, mean | worse, worst of {len({(r['model'], r['reward']) for r in rows})} "
        f"| at most {ALLOWED:g} worse | surely (whole interval) |",
        "|---|---|---|---|---|---|",
    ]
    for plan in sorted({(r["cost"], r["after"], r["keep"]) for r in rows if r["after"] < STEPS}):
        group = [r for r in rows if (r["cost"], r["after"], r["keep"]) == plan]
        worse = [max(mean for mean, _, _ in r["worse"].values()) for r in group]
        lines.append(
            f"| after {plan[1]} keep {plan[2]} | {plan[0]:.0%} | {sum(worse) / len(worse):+.2f} | {max(worse):+.2f} "
            f"| {sum(r['within'] for r in group)} of {len(group)} | {sum(r['surely_within'] for r in group)} |"
        )
    lines += [
        "",
        "The larger of the two halves' means is given above; both are below.",
        "",
        "![worse over steps spent](plan_fidelity.png)",
        "",
        "| model | reward | plan | steps | true ranks | best 12 worse | worst 12 worse | Spearman | within |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        whole = r["after"] == STEPS
        plan = "unpruned" if whole else f"after {r['after']} keep {r['keep']}"
        said = ["" if whole else f"{m:+.2f} [{a:+.2f}, {b:+.2f}]" for m, a, b in r["worse"].values()]
        lines.append(
            f"| {r['model']} | {r['reward']} | {plan} | {r['cost']:.0%} | {r['top_rank']:.1f} / {r['bottom_rank']:.1f} "
            f"| {said[0]} | {said[1]} | {r['spearman']:.3f} | {'' if whole else 'yes' if r['within'] else 'no'} |"
        )
    told = ", ".join(f"{model} {value:.2g}" for model, value in off.items())
    lines += [
        "",
        f"Really pruned groups of {CHECKED} prompts differ from these in no score by more than so many standard",
        f"deviations of the group: {told}.",
        "Spearman is over the candidates that were not pruned, so it is not comparable between plans.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
