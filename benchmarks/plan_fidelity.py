"""Fidelity of cheaper exploration plans: `python benchmarks/plan_fidelity.py [--device cuda] [--models mini-sana …]`.

Compares NVFP4 with BF16 at 10 steps, over held-out prompts × 96 candidates, scoring all rewards on the same images. The
plans use six Euler steps or four steps fitted to the model, with and without pruning. The schedule of the fitted steps
is chosen on training prompts. One pass over all candidates, also scored after some of its steps, evaluates every plan.
On a GPU this is an approximation, because a value near a rounding boundary may round differently in a batch of another
size. A few groups are therefore really pruned, and the largest difference is printed. Scores are kept in
runs/plan_fidelity, from which the command resumes. Writes docs/results/plan_fidelity.{json,md,png}.
"""

import argparse
import itertools
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from caveats import PREPARED_FOR_NVFP4
from plan_fidelity_plot import ALLOWED, write_plot
from rich.console import Console
from rich.progress import track
from safetensors.torch import load_file, save_file
from solrl_core.families import load_backbone
from solrl_core.fidelity import rank_fidelity
from solrl_core.fitting import SCHEDULES
from solrl_core.generator import Generator
from solrl_core.rewards import RewardSet
from solrl_core.selection import best_worst
from solrl_minis.world import sample_prompts
from solrl_proto.noise import expand_seeds
from solrl_proto.rollouts import FittedSolver, Plan, PromptItem, Prune
from solrl_trainer.calibration.fitting import fit_solvers, recipe_examples
from solrl_trainer.config import RunConfig
from solrl_trainer.evaluation import paired_gain
from solrl_trainer.presets import resolve
from solrl_trainer.prompts import find_prompts, read_prompts
from solrl_trainer.rollouts.candidates import PlannedCandidates
from solrl_trainer.rollouts.overlap import SideStream
from solrl_trainer.rollouts.scoring import Scorer

MODELS = ("mini-sana", "mini-sd3", "mini-flux")
REWARDS = ("clipscore", "pickscore", "hpsv2", "imagereward")
TRUE_STEPS, STEPS, FITTED = 10, 6, 4
AFTER = {STEPS: (2, 3, 4), FITTED: (3,)}
KEEP = {STEPS: (24, 32, 48, 64, 80), FITTED: (24, 32, 40, 48, 64)}
"""By number of steps: the steps after which candidates are pruned, and the numbers of candidates kept."""
CHOSEN_ON, CHOSEN_FOR = 16, 48
"""Training prompts for choosing the schedule of the fitted steps, and candidates kept before the last step there."""
CHECKED = 2
"""Prompts whose groups are also really pruned."""
SAVED_EVERY = 16

Scores = dict[str, torch.Tensor]
"""float32 [prompts, rewards, candidates]: "true"; "6/2" for scores of the predicted images after 2 of 6 steps, "6/6" at
the end. "off" [prompts checked, plans]: see `really_pruned`."""
Way = tuple[int, int, int]
"""A plan: (steps, steps before pruning, candidates kept). Pruning after all steps means no pruning."""


def main() -> None:
    """Measure the missing scores, print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--candidates", type=int, default=96)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--scores", type=Path, default=Path("runs/plan_fidelity"))
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    args = parser.parse_args()
    prompts = held_out(args.prompts)
    found = {model: measure(model, prompts, args.candidates, args.device, args.scores) for model in args.models}
    rows = [row for model, scores in found.items() for row in judge(model, scores)]
    off = {model: float(scores["off"].max()) for model, scores in found.items()}
    solvers = {model: json.loads(solver_file(args.scores, model).read_text()) for model in args.models}
    args.out.mkdir(parents=True, exist_ok=True)
    settings = {key: getattr(args, key) for key in ("models", "prompts", "candidates", "device")}
    result = {**settings, "off": off, "solvers": solvers, "rows": rows}
    (args.out / "plan_fidelity.json").write_text(json.dumps(result, indent=1) + "\n")
    sigmas = {model: solver["sigmas"] for model, solver in solvers.items()}
    text = table(rows, off, sigmas, args.prompts, args.candidates)
    (args.out / "plan_fidelity.md").write_text(text)
    write_plot(rows, args.out / "plan_fidelity.png")
    print(text)


def held_out(count: int) -> list[PromptItem]:
    """Held-out prompts of the shapes world: the 128 shipped ones first, then further held-out ones."""
    with tempfile.TemporaryDirectory() as folder:
        lines = [json.dumps(prompt) for prompt in sample_prompts(held_out=True, count=count, seed=0)]
        (Path(folder) / "test_metadata.jsonl").write_text("\n".join(lines))
        return read_prompts(Path(folder), "test")


def solver_file(folder: Path, model: str) -> Path:
    """Path of the chosen fitted solver, next to the scores."""
    return folder / f"{model}.solver.json"


def measure(model: str, prompts: Sequence[PromptItem], candidates: int, device: str, folder: Path) -> Scores:
    """Score the groups of one model, resuming from the scores in `folder` and saving them there."""
    file = folder / f"{model}.safetensors"
    scores: Scores = load_file(file) if file.is_file() else {}
    begun = len(scores["true"]) if scores else 0
    if begun >= len(prompts):
        return scores
    file.parent.mkdir(parents=True, exist_ok=True)
    backbone = load_backbone(model, device=device)
    rewards = RewardSet.load(REWARDS, backbone)
    true, proxy = Generator(backbone, "bf16"), Generator(backbone, "nvfp4")
    config = resolve(f"{model}/sol_rl/{REWARDS[0]}").config
    if not solver_file(folder, model).is_file():
        chosen = choose_solver(config, candidates, true, proxy, rewards)
        solver_file(folder, model).write_text(chosen.model_dump_json(indent=1) + "\n")
    solver = FittedSolver.model_validate_json(solver_file(folder, model).read_text())
    for index, prompt in enumerate(track(prompts[begun:], f"{model}, groups", console=Console(stderr=True)), begun + 1):
        seeds = expand_seeds(0, prompt.id, candidates)
        new = score(prompt, seeds, true, proxy, rewards, {STEPS: "euler", FITTED: solver})
        if index <= CHECKED:
            new["off"] = torch.tensor(really_pruned(config, prompt, seeds, new, proxy, rewards, solver))
        scores |= {key: torch.cat([*([scores[key]] if key in scores else []), part[None]]) for key, part in new.items()}
        if index % SAVED_EVERY == 0 or index == len(prompts):
            # Write to another name first, so that an interruption does not destroy the saved scores.
            partial = file.with_suffix(".partial")
            save_file(scores, partial)
            partial.replace(file)
    return scores


def choose_solver(
    config: RunConfig, candidates: int, true: Generator, proxy: Generator, rewards: RewardSet
) -> FittedSolver:
    """Choose among the solvers fitted to each schedule: the one that best separates best from worst candidates.

    The criterion is the difference of their true ranks, for the reward on which it is smallest.
    """
    solvers = fit_solvers(true, recipe_examples(config, true), SCHEDULES)
    parted = torch.zeros(len(solvers), len(REWARDS))
    for prompt in read_prompts(find_prompts(config.prompts), "train")[:CHOSEN_ON]:
        seeds = expand_seeds(1, prompt.id, candidates)
        for at, solver in enumerate(solvers):
            found = score(prompt, seeds, true, proxy, rewards, {FITTED: solver})
            for reward in range(len(REWARDS)):
                halfway, final = found[f"{FITTED}/{FITTED - 1}"][reward], found[f"{FITTED}/{FITTED}"][reward]
                rank = rank_fidelity(pruned(halfway, final, CHOSEN_FOR)[None], found["true"][reward][None])
                parted[at, reward] += (rank.bottom_rank - rank.top_rank) / CHOSEN_ON
    return solvers[int(parted.min(1).values.argmax())]


def score(
    prompt: PromptItem,
    seeds: Sequence[int],
    true: Generator,
    proxy: Generator,
    rewards: RewardSet,
    solvers: Mapping[int, str | FittedSolver],
) -> dict[str, torch.Tensor]:
    """Scores of one group [rewards, candidates] for each number of steps and its solver, by the keys of `Scores`."""

    def scored(images: torch.Tensor) -> torch.Tensor:
        each = rewards.score(REWARDS, images, [prompt.text] * len(seeds), [prompt.metadata] * len(seeds))
        return torch.stack([each[name] for name in REWARDS])

    found = {"true": scored(true.generate(prompt.text, seeds, steps=TRUE_STEPS).images)}
    for steps, solver in solvers.items():
        trajectory = None
        for until in (*AFTER[steps], steps):
            made = proxy.generate(prompt.text, seeds, steps=steps, solver=solver, start=trajectory, until=until)
            trajectory = made.trajectory
            found[f"{steps}/{until}"] = scored(made.images)
    return found


def pruned(halfway: torch.Tensor, final: torch.Tensor, keep: int) -> torch.Tensor:
    """Scores [candidates] of a plan that keeps the `keep` most extreme candidates halfway; NaN for the others."""
    scores = torch.full_like(final, torch.nan)
    places = best_worst(halfway, keep)
    scores[places] = final[places]
    return scores


def really_pruned(
    config: RunConfig,
    prompt: PromptItem,
    seeds: Sequence[int],
    scores: Scores,
    proxy: Generator,
    rewards: RewardSet,
    solver: FittedSolver,
) -> list[float]:
    """Prune as the service does; largest difference of a score per plan, in standard deviations of the group.

    A candidate that only one of the two keeps counts as infinitely different.
    """
    found = []
    side = SideStream(proxy.backbone.device)
    scorer = Scorer(rewards, [spec.name for spec in config.trained], config.trained, side)
    for steps, after, keep in grid(len(seeds)):
        by = None if steps == STEPS else solver
        plan = Plan(steps=steps, fitted=by, precision="nvfp4", prune=Prune(after=after, keep=keep))
        product = PlannedCandidates(proxy, lambda plan=plan: plan, scorer).scores(prompt, seeds)
        final = scores[f"{steps}/{steps}"][0]
        ours = pruned(scores[f"{steps}/{after}"][0], final, keep)
        same = bool((product.isnan() == ours.isnan()).all())
        found.append(float((product - ours).nan_to_num().abs().max() / final.std()) if same else torch.inf)
    return found


def grid(candidates: int) -> list[Way]:
    """All plans with pruning."""
    return [
        (steps, after, keep)
        for steps in (STEPS, FITTED)
        for after, keep in itertools.product(AFTER[steps], KEEP[steps])
        if keep < candidates
    ]


def judge(model: str, scores: Scores) -> list[dict[str, Any]]:
    """A row per reward and plan: six steps without pruning first, then the fitted steps without pruning."""
    candidates = scores["true"].shape[2]
    rows = []
    for at, reward in enumerate(REWARDS):
        true = scores["true"][:, at]
        wholes = {steps: ranks(scores[f"{steps}/{steps}"][:, at], true) for steps in (STEPS, FITTED)}
        for steps, after, keep in [(STEPS, STEPS, candidates), (FITTED, FITTED, candidates), *grid(candidates)]:
            pairs = zip(scores[f"{steps}/{after}"][:, at], scores[f"{steps}/{steps}"][:, at], strict=True)
            found = ranks(torch.stack([pruned(half, final, keep) for half, final in pairs]), true)
            worse = worse_than(wholes[STEPS], found)
            rows.append(
                {
                    "model": model,
                    "reward": reward,
                    "steps": steps,
                    "after": after,
                    "keep": keep,
                    "cost": (after * candidates + (steps - after) * keep) / (STEPS * candidates),
                    "top_rank": float(found["top"].mean()),
                    "bottom_rank": float(found["bottom"].mean()),
                    "worse": worse,
                    "worse_than_unpruned": worse_than(wholes[steps], found),
                    "spearman": float(found["spearman"].nanmean()),
                    "within": all(mean <= ALLOWED for mean, _, _ in worse.values()),
                    "surely_within": all(high <= ALLOWED for _, _, high in worse.values()),
                }
            )
    return rows


def worse_than(whole: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> dict[str, tuple[float, float, float]]:
    """Increase in true rank of the selected best and worst: mean and 95 % interval, paired over prompts."""
    return {
        half: paired_gain(sign * whole[half][:, None], sign * found[half][:, None])
        for half, sign in (("top", 1), ("bottom", -1))
    }


def ranks(proxy: torch.Tensor, true: torch.Tensor) -> dict[str, torch.Tensor]:
    """Mean true rank of the proxy's best and worst 12 in each group, and Spearman over candidates not pruned."""
    each = [rank_fidelity(p[None], t[None]) for p, t in zip(proxy, true, strict=True)]
    return {
        "top": torch.tensor([one.top_rank for one in each]),
        "bottom": torch.tensor([one.bottom_rank for one in each]),
        "spearman": torch.tensor([one.spearman for one in each]),
    }


def name(steps: int, after: int, keep: int) -> str:
    """Short name of a plan."""
    long = "" if steps == STEPS else f"{steps} fitted steps"
    return ", ".join(filter(None, [long, f"after {after} keep {keep}" if after < steps else ""])) or "unpruned"


def largest(row: dict[str, Any], which: str) -> float:
    """Larger of the means for the best and the worst."""
    return max(mean for mean, _, _ in row[which].values())


def table(
    rows: Sequence[dict[str, Any]],
    off: dict[str, float],
    sigmas: dict[str, list[float]],
    prompts: int,
    candidates: int,
) -> str:
    """Markdown tables: one row per plan over all models and rewards, then all rows."""
    count = len({(r["model"], r["reward"]) for r in rows})
    lines = [
        "# Fidelity of cheaper exploration plans",
        "",
        f"By `python benchmarks/plan_fidelity.py`: emulated NVFP4 compared with BF16 at {TRUE_STEPS} steps, {prompts}",
        f"held-out prompts × {candidates} candidates. A plan takes {STEPS} Euler steps, or {FITTED} steps fitted to",
        "the model. Pruning keeps the candidates with the most extreme rewards of the image predicted halfway.",
        "Worse: increase of the mean true rank of the 12 candidates selected as best (worst) over",
        f"{STEPS} unpruned steps, paired over prompts, with its 95 % interval. Steps: candidate steps spent, relative",
        f"to {STEPS} unpruned ones; decoding and scoring halfway, once per candidate, is not included.",
        "",
        *PREPARED_FOR_NVFP4,
        "",
        f"| plan | steps | worse, mean | worse, maximum of {count} "
        f"| at most {ALLOWED:g} worse | with whole interval | worse than unpruned, maximum |",
        "|---|---|---|---|---|---|---|",
    ]
    for plan in sorted({(r["cost"], r["steps"], r["after"], r["keep"]) for r in rows if r["cost"] < 1}):
        group = [r for r in rows if (r["cost"], r["steps"], r["after"], r["keep"]) == plan]
        worse = [largest(r, "worse") for r in group]
        own = f"{max(largest(r, 'worse_than_unpruned') for r in group):+.2f}" if plan[2] < plan[1] else ""
        lines.append(
            f"| {name(*plan[1:])} | {plan[0]:.0%} | {sum(worse) / len(worse):+.2f} | {max(worse):+.2f} "
            f"| {sum(r['within'] for r in group)} of {len(group)} | {sum(r['surely_within'] for r in group)} | {own} |"
        )
    along = "; ".join(f"{model} {', '.join(f'{s:g}' for s in levels)}" for model, levels in sigmas.items())
    lines += [
        "",
        "The table above gives the larger of the means for the best and the worst; the table below gives both. The",
        f"noise levels of the fitted steps were chosen on {CHOSEN_ON} training prompts: {along}.",
        "",
        "![increase in true rank over steps spent](plan_fidelity.png)",
        "",
        "| model | reward | plan | steps | true ranks | best 12 worse | worst 12 worse | Spearman | within |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        whole = r["after"] == STEPS
        said = ["" if whole else f"{m:+.2f} [{a:+.2f}, {b:+.2f}]" for m, a, b in r["worse"].values()]
        lines.append(
            f"| {r['model']} | {r['reward']} | {name(r['steps'], r['after'], r['keep'])} | {r['cost']:.0%} "
            f"| {r['top_rank']:.1f} / {r['bottom_rank']:.1f} "
            f"| {said[0]} | {said[1]} | {r['spearman']:.3f} | {'' if whole else 'yes' if r['within'] else 'no'} |"
        )
    told = ", ".join(f"{model} {value:.2g}" for model, value in off.items())
    lines += [
        "",
        f"All plans are evaluated from one pass. The groups of {CHECKED} prompts were also really pruned; their scores",
        f"differ by up to this many standard deviations of the group: {told}.",
        "Spearman is over the candidates that were not pruned, so it is not comparable between plans.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
