"""Fidelity of cheaper exploration plans: `python benchmarks/plan_fidelity.py [--device cuda] [--models mini-sana …]`.

Compares NVFP4 and FP8 with BF16 at 10 steps, over held-out prompts × 96 candidates, scoring all rewards on the same
images. The plans use six steps of the solver that the preset of the model's family uses, or four steps fitted to the
model, with and without pruning: after some steps, the most extreme candidates continue, which only this benchmark
knows. The schedule of the fitted steps is chosen on training prompts. One pass over all candidates, also scored after
some of its steps, evaluates every plan. Without FP8 units, FP8 is emulated. Scores are kept in runs/plan_fidelity, from
which the same command resumes.
Writes benchmarks/results/plan_fidelity.{json,md}.
"""

import argparse
import itertools
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from minis_recipe.world import sample_prompts
from rich.console import Console
from rich.progress import track
from safetensors.torch import load_file, save_file
from solrl_core.families import load_backbone
from solrl_core.fidelity import rank_fidelity
from solrl_core.rewards import RewardSet
from solrl_core.sampling.fitting import SCHEDULES
from solrl_core.sampling.generator import Generator
from solrl_core.sampling.sampler import SOLVERS
from solrl_engine.precision_check import generator_at
from solrl_proto.noise import expand_seeds
from solrl_proto.rollouts import FittedSolver, PromptItem
from solrl_proto.selection import best_worst
from solrl_trainer.calibration.plans import fit_solvers, recipe_examples
from solrl_trainer.prompts.prompt_sets import find_prompts, read_prompts
from solrl_trainer.records.evaluations import paired_gain
from solrl_trainer.settings.config import RunConfig
from solrl_trainer.settings.presets import resolve
from support.plan_page import ALLOWED, FITTED, STEPS, TRUE_STEPS, WHOLE, page
from support.precisions import LISTS, MODELS, PRECISIONS, PRESET, REWARDS, solver_of, use_layers
from support.results import Results, command, options

NAME = "plan_fidelity"
AFTER = {STEPS: (2, 3, 4), FITTED: (3,)}
KEEP = {STEPS: (24, 32, 48, 64, 80), FITTED: (24, 32, 40, 48, 64)}
"""By number of steps: the steps after which candidates are pruned, and the numbers of candidates kept."""
CHOSEN_FOR = 48
"""Candidates kept before the last step where the schedule of the fitted steps is chosen."""
SAVED_EVERY = 16

Scores = dict[str, torch.Tensor]
"""float32 [prompts, rewards, candidates]: "true"; "fp8/6/2" for scores of the images predicted after 2 of 6 steps at
FP8, "fp8/6/6" at the end."""
Way = tuple[int, int, int]
"""A plan: (steps, steps before pruning, candidates kept). Pruning after all steps means no pruning."""


@dataclass(frozen=True)
class Models:
    """A model's generators, rewards and settings.

    Attributes:
        config: settings, with the solver of the six steps.
        true: BF16.
        proxies: precision → generator.
    """

    config: RunConfig
    true: Generator
    proxies: dict[str, Generator]
    rewards: RewardSet


def _options() -> argparse.ArgumentParser:
    parser = options(__doc__, device="cpu")
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--candidates", type=_candidates, default=96)
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--solver", choices=(PRESET, *sorted(SOLVERS)), default=PRESET)
    parser.add_argument("--layers", choices=LISTS, default=LISTS[0], help="quantised at NVFP4")
    parser.add_argument("--chosen-on", type=int, default=16, help="training prompts for choosing the fitted steps")
    parser.add_argument("--scores", type=Path, default=Path("runs/plan_fidelity"))
    return parser


def _candidates(text: str) -> int:
    least = min(map(min, KEEP.values()))
    if int(text) <= least:
        raise argparse.ArgumentTypeError(f"got {text}; expected more than {least}, which the cheapest plans keep")
    return int(text)


def main() -> None:
    args = _options().parse_args()
    results = Results(NAME, args.out, page)
    if args.render:
        return results.show()
    prompts = held_out(args.prompts)
    rows, solvers, used, numerics = [], {}, {}, {}
    for model in args.models:
        scores, solvers[model], used[model], numerics = measure(model, prompts, args)
        rows += [row for precision in args.precisions for row in judge(model, precision, scores)]
    names = ("models", "prompts", "candidates", "precisions", "layers", "chosen_on", "device")
    settings = {name: getattr(args, name) for name in names}
    results.found = {
        "command": command(NAME, _options(), settings | {"solver": args.solver}),
        **settings,
        "solver": used,
        "numerics": numerics,
        "solvers": {model: solver.model_dump(mode="json") for model, solver in solvers.items()},
        "rows": rows,
    }
    results.write()
    results.show()


def held_out(count: int) -> list[PromptItem]:
    """Held-out prompts of the shapes world: the 128 shipped ones first, then further held-out ones."""
    with tempfile.TemporaryDirectory() as folder:
        lines = [json.dumps(prompt) for prompt in sample_prompts(held_out=True, count=count, seed=0)]
        (Path(folder) / "test_metadata.jsonl").write_text("\n".join(lines))
        return read_prompts(Path(folder), "test")


def measure(
    model: str, prompts: Sequence[PromptItem], args: argparse.Namespace
) -> tuple[Scores, FittedSolver, str, dict[str, str]]:
    """Score the groups of one model, resuming from the stored scores and storing them.

    Returns:
        The scores, the fitted solver, the solver of the six steps, and precision → numerics.
    """
    backbone = load_backbone(model, device=args.device)
    use_layers(backbone, args.layers)
    solver = solver_of(args.solver, backbone.family)
    config = resolve(f"{model}/sol_rl/{REWARDS[0]}", overrides=[f"solver={solver}"]).config
    proxies = {precision: generator_at(backbone, precision) for precision in args.precisions}
    models = Models(config, Generator(backbone, "bf16"), proxies, RewardSet.load(REWARDS, backbone))
    numerics: dict[str, str] = {precision: generator.numerics for precision, generator in proxies.items()}
    args.scores.mkdir(parents=True, exist_ok=True)
    name = "-".join((model, solver, *args.precisions, *([args.layers] if args.layers != "own" else [])))
    # Scores of older versions, with other decodings, are in files of other names.
    solver_file, file = args.scores / f"{name}.solver.json", args.scores / f"{name}.whole-fp8.safetensors"
    if not solver_file.is_file():
        solver_file.write_text(choose_solver(models, args.candidates, args.chosen_on).model_dump_json(indent=1) + "\n")
    fitted = FittedSolver.model_validate_json(solver_file.read_text())
    scores: Scores = load_file(file) if file.is_file() else {}
    begun = len(scores["true"]) if scores else 0
    bar = track(prompts[begun:], f"{model}, groups", console=Console(stderr=True))
    for index, prompt in enumerate(bar, begun + 1):
        seeds = expand_seeds(0, prompt.id, args.candidates)
        new = {"true": true_scores(prompt, seeds, models)}
        new |= proxy_scores(prompt, seeds, models, {STEPS: solver, FITTED: fitted})
        scores |= {key: torch.cat([*([scores[key]] if key in scores else []), part[None]]) for key, part in new.items()}
        if index % SAVED_EVERY == 0 or index == len(prompts):
            # Write to another name first, so that an interruption does not destroy the saved scores.
            partial = file.with_suffix(".partial")
            save_file(scores, partial)
            partial.replace(file)
    return scores, fitted, solver, numerics


def choose_solver(models: Models, candidates: int, prompts: int) -> FittedSolver:
    """Choose among the solvers fitted to each schedule: the one that best separates best from worst candidates.

    The criterion is the difference of their true ranks, mean over training prompts, for the reward and precision at
    which it is smallest.
    """
    solvers = fit_solvers(models.true, recipe_examples(models.config, models.true), SCHEDULES)
    parted = torch.zeros(len(solvers), len(models.proxies), len(REWARDS))
    for prompt in read_prompts(find_prompts(models.config.prompts), "train")[:prompts]:
        seeds = expand_seeds(1, prompt.id, candidates)
        true = true_scores(prompt, seeds, models)
        for at, solver in enumerate(solvers):
            found = proxy_scores(prompt, seeds, models, {FITTED: solver})
            for (place, precision), reward in itertools.product(enumerate(models.proxies), range(len(REWARDS))):
                halfway, final = (found[f"{precision}/{FITTED}/{n}"][reward] for n in (FITTED - 1, FITTED))
                proxy = pruned(halfway, final, min(CHOSEN_FOR, candidates))
                rank = rank_fidelity(proxy[None], true[reward][None])
                parted[at, place, reward] += rank.bottom_rank - rank.top_rank
    return solvers[int(parted.flatten(1).min(1).values.argmax())]


def true_scores(prompt: PromptItem, seeds: Sequence[int], models: Models) -> torch.Tensor:
    """True scores of one group [rewards, candidates]."""
    made = models.true.generate(prompt.text, seeds, steps=TRUE_STEPS, solver=models.config.solver)
    return scored(prompt, made.images, models)


def proxy_scores(
    prompt: PromptItem,
    seeds: Sequence[int],
    models: Models,
    solvers: Mapping[int, str | FittedSolver],
) -> dict[str, torch.Tensor]:
    """Scores of one group [rewards, candidates] for each number of steps and its solver, by the keys of `Scores`."""
    found = {}
    for (precision, proxy), (steps, solver) in itertools.product(models.proxies.items(), solvers.items()):
        trajectory = None
        for until in (*AFTER[steps], steps):
            made = proxy.generate(prompt.text, seeds, steps=steps, solver=solver, start=trajectory, until=until)
            trajectory = made.trajectory
            found[state(precision, steps, until)] = scored(prompt, made.images, models)
    return found


def state(precision: str, steps: int, until: int) -> str:
    """Key of `Scores` for images predicted after `until` of `steps` steps."""
    return f"{precision}/{steps}/{until}"


def scored(prompt: PromptItem, images: torch.Tensor, models: Models) -> torch.Tensor:
    """Scores [rewards, candidates] of a prompt's images."""
    count = len(images)
    each = models.rewards.score(REWARDS, images, [prompt.text] * count, [prompt.metadata] * count)
    return torch.stack([each[name] for name in REWARDS])


def pruned(halfway: torch.Tensor, final: torch.Tensor, keep: int) -> torch.Tensor:
    """Scores [candidates] of a plan that keeps the `keep` most extreme candidates halfway.

    The others get the median of the kept ones, so that none of them is selected.
    """
    places = best_worst(halfway, keep)
    scores = torch.full_like(final, float(final[places].median()))
    scores[places] = final[places]
    return scores


def grid(candidates: int) -> list[Way]:
    return [
        (steps, after, keep)
        for steps in (STEPS, FITTED)
        for after, keep in itertools.product(AFTER[steps], KEEP[steps])
        if keep < candidates
    ]


def judge(model: str, precision: str, scores: Scores) -> list[dict[str, Any]]:
    """A row per reward and plan: six steps without pruning first, then the fitted steps without pruning.

    All are compared with six steps without pruning.
    """
    candidates = scores["true"].shape[2]
    unpruned = (STEPS, FITTED)
    rows = []
    for at, reward in enumerate(REWARDS):
        true = scores["true"][:, at]
        every = {steps: ranks(scores[state(precision, steps, steps)][:, at], true) for steps in unpruned}
        for steps, after, keep in (*((n, n, candidates) for n in unpruned), *grid(candidates)):
            halfway, final = (scores[state(precision, steps, until)][:, at] for until in (after, steps))
            pairs = zip(halfway, final, strict=True)
            found = ranks(torch.stack([pruned(half, end, keep) for half, end in pairs]), true)
            worse = worse_than(every[STEPS], found)
            rows.append(
                {
                    "model": model,
                    "precision": precision,
                    "reward": reward,
                    "steps": steps,
                    "after": after,
                    "keep": keep,
                    "decoded": WHOLE,
                    "cost": (after * candidates + (steps - after) * keep) / (STEPS * candidates),
                    "top_rank": float(found["top"].mean()),
                    "bottom_rank": float(found["bottom"].mean()),
                    "worse": worse,
                    "worse_than_unpruned": worse_than(every[steps], found),
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
    """Mean true rank of the proxy's best and worst 12 in each group."""
    each = [rank_fidelity(p[None], t[None]) for p, t in zip(proxy, true, strict=True)]
    return {
        "top": torch.tensor([one.top_rank for one in each]),
        "bottom": torch.tensor([one.bottom_rank for one in each]),
    }


if __name__ == "__main__":
    main()
