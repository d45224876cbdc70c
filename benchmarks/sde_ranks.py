"""Prediction of stochastic trajectories by cheap candidates: `python benchmarks/sde_ranks.py [--models mini-sana …]`.

FlowGRPO and DanceGRPO regenerate selected seeds by an SDE from the same initial noise, with noise at each step. This
compares the rewards of the recipes' BF16 trajectories, on held-out prompts, with those of three kinds of candidates
from the same seeds: by an ODE; by the same SDE in emulated NVFP4, with the same noise at each step; and by the SDE with
other noise at each step, which shows how far the initial noise decides at all.
Writes docs/results/sde_ranks.{json,md}.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from caveats import PREPARED_FOR_NVFP4
from rank_tables import HEADER, REWARDS, Row, cells, command, mean, options, run
from rich.console import Console
from rich.progress import track
from solrl_core.families import load_backbone
from solrl_core.fidelity import rank_fidelity
from solrl_core.generator import Generator
from solrl_core.noise import initial_noise
from solrl_core.rewards import RewardSet
from solrl_core.sampler import Trajectory
from solrl_core.solver_specs import SolverSpec, make_solver
from solrl_proto.noise import expand_seeds
from solrl_proto.rollouts import PromptItem
from solrl_trainer.presets import resolve
from solrl_trainer.prompts import find_prompts, read_prompts

RECIPES = ("flowgrpo", "flowgrpo_fast", "dancegrpo")
ODE_STEPS = (6, 10)
SAME = "the same SDE, NVFP4"
OTHER = "the SDE with other noise, BF16"
NAME = "sde_ranks"


def _options() -> argparse.ArgumentParser:
    parser = options(__doc__, prompts=16)
    parser.add_argument("--precision", default="bf16", help="precision of the ODE candidates")
    return parser


def sampler_of(model: str, recipe: str) -> tuple[SolverSpec, int]:
    """Solver and steps of a recipe's trajectories in its first iteration."""
    config = resolve(f"{model}/{recipe}/{REWARDS[0]}").config
    steps = config.explore.steps
    return config.training_data.solver(config.solver, steps, 0, config.seed), steps


def measure(model: str, args: argparse.Namespace) -> list[Row]:
    """Measure one model; a row per recipe, reward and proxy."""
    backbone = load_backbone(model, device=args.device)
    rewards = RewardSet.load(args.rewards, backbone)
    generators = {precision: Generator(backbone, precision) for precision in {args.precision, "nvfp4", "bf16"}}
    scores: dict[tuple[str, str], list[torch.Tensor]] = {}

    def score(name: str, prompt: PromptItem, precision: str, seeds: Sequence[int], **how: Any) -> None:
        images = generators[precision].generate(prompt.text, seeds, **how).images
        texts, metadata = [prompt.text] * len(images), [prompt.metadata] * len(images)
        for reward, values in rewards.score(args.rewards, images, texts, metadata).items():
            scores.setdefault((name, reward), []).append(values)

    prompts = read_prompts(find_prompts("shapes"), "test")[: args.prompts]
    for prompt in track(prompts, f"{model}, groups", console=Console(stderr=True)):
        seeds = expand_seeds(0, prompt.id, args.candidates)
        others = expand_seeds(1, prompt.id, args.candidates)
        for steps in ODE_STEPS:
            score(_ode(args.precision, steps), prompt, args.precision, seeds, steps=steps)
        for recipe in RECIPES:
            solver, steps = sampler_of(model, recipe)
            score(recipe, prompt, "bf16", seeds, steps=steps, solver=solver)
            score(f"{recipe} {SAME}", prompt, "nvfp4", seeds, steps=steps, solver=solver)
            # The initial noise is the first seeds', the noise of the steps that of the others.
            start = Trajectory(initial_noise(seeds, backbone.latent_shape), make_solver(solver))
            score(f"{recipe} {OTHER}", prompt, "bf16", others, steps=steps, start=start)
    odes = [_ode(args.precision, steps) for steps in ODE_STEPS]
    return [
        {"model": model, "recipe": recipe, "reward": reward, "proxy": name.removeprefix(f"{recipe} ")}
        | vars(rank_fidelity(torch.stack(scores[name, reward]), torch.stack(scores[recipe, reward])))
        for recipe in RECIPES
        for reward in args.rewards
        for name in (*odes, f"{recipe} {SAME}", f"{recipe} {OTHER}")
    ]


def _ode(precision: str, steps: int) -> str:
    return f"ODE, {precision.upper()}, {steps} steps"


def table(rows: Sequence[Row], settings: Mapping[str, Any]) -> str:
    """Markdown page with a table of all rows, means over the rewards."""
    lines = [
        "# Ranks of cheap candidates against stochastic trajectories",
        "",
        f"By `{command(NAME, _options(), settings)}`, on the device `{settings['device']}`:",
        f"{settings['prompts']} held-out prompts × {settings['candidates']} candidates under the base, means over",
        f"{', '.join(settings['rewards'])}. The recipes' trajectories are",
        "generated in BF16. All candidates begin at the trajectories' initial noise.",
        "*The same SDE* takes the same steps with the same noise in each, in emulated NVFP4: this is what",
        "`explore.sampler=training` explores. *The SDE with other noise* shows how far the initial noise decides.",
        "Overlaps are shares of the best (worst) 4/8/12. True ranks are means over the 12 candidates ranked best",
        "(worst): perfect 6.5 / 90.5 of 96, chance 48.5.",
        "FlowGRPO-Fast has the window of a run's first iteration, steps 3 and 4 of 10. DanceGRPO takes 12 steps.",
        "In BF16 on a CPU, the same SDE gives the trajectories themselves.",
        "",
        *PREPARED_FOR_NVFP4,
        "",
        f"| model | trajectories | candidates | {HEADER} |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for key in dict.fromkeys((row["model"], row["recipe"], row["proxy"]) for row in rows):
        found = [row for row in rows if (row["model"], row["recipe"], row["proxy"]) == key]
        lines.append(f"| {' | '.join(key)} | {cells(mean(found))} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    run(NAME, _options(), measure, table)
