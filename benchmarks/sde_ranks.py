"""Prediction of stochastic trajectories by ODE ranks: `python benchmarks/sde_ranks.py [--models mini-sana …]`.

Two-stage exploration for FlowGRPO and DanceGRPO finds seeds by a cheap ODE and regenerates them by an SDE from the same
initial noise, with fresh noise at each step. This compares the rewards of ODE candidates with those of the recipes'
stochastic trajectories, on held-out prompts. A second draw of the same trajectories, from the same initial noise with
other noise at each step, shows how far the initial noise decides at all.
Writes docs/results/sde_ranks.{json,md}.
"""

import argparse
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from caveats import PREPARED_FOR_NVFP4
from rich.console import Console
from rich.progress import track
from solrl_core.families import load_backbone
from solrl_core.fidelity import Fidelity, rank_fidelity
from solrl_core.generator import Generator
from solrl_core.noise import initial_noise
from solrl_core.rewards import RewardSet
from solrl_core.sampler import Trajectory
from solrl_core.solver_specs import make_solver
from solrl_core.solvers import Solver
from solrl_proto.noise import expand_seeds
from solrl_proto.rollouts import PromptItem
from solrl_trainer.algorithms.registry import ALGORITHMS
from solrl_trainer.presets import resolve
from solrl_trainer.prompts import find_prompts, read_prompts

MODELS = ("mini-sana", "mini-sd3", "mini-flux")
REWARDS = ("clipscore", "pickscore", "hpsv2", "imagereward")
RECIPES = ("flowgrpo", "flowgrpo_fast", "dancegrpo")
ODE_STEPS = (6, 10)
AGAIN = "the SDE again"
NAME = "sde_ranks"


def main() -> None:
    """Measure all models, print the table and write it."""
    args = _options().parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    settings = {key: value for key, value in vars(args).items() if key != "out"}
    rows: list[dict[str, Any]] = []
    for place, model in enumerate(args.models):
        rows += measure(model, args)
        settings["models"] = args.models[: place + 1]
        (args.out / f"{NAME}.json").write_text(json.dumps({**settings, "rows": rows}, indent=1) + "\n")
        (args.out / f"{NAME}.md").write_text(table(rows, settings))
    print(table(rows, settings))


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--rewards", nargs="+", default=list(REWARDS))
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--candidates", type=int, default=96)
    parser.add_argument("--precision", default="bf16", help="precision of the ODE candidates")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    return parser


def command(settings: Mapping[str, Any]) -> str:
    """Command line that gives these settings."""
    words = ["python", f"benchmarks/{NAME}.py"]
    for name, default in vars(_options().parse_args([])).items():
        value = settings.get(name, default)
        if name != "out" and value != default:
            words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return shlex.join(words)


def sampler_of(model: str, recipe: str) -> tuple[Solver, int]:
    """Solver and steps of a recipe's trajectories in its first iteration."""
    config = resolve(f"{model}/{recipe}/{REWARDS[0]}").config
    data, steps = ALGORITHMS.find(config.algorithm.name)(config.algorithm).trains_on, config.explore.steps
    return make_solver(data.solver(config.solver, steps, 0, config.seed)), steps


def measure(model: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure one model; a row per recipe, reward and proxy."""
    backbone = load_backbone(model, device=args.device)
    rewards = RewardSet.load(args.rewards, backbone)
    proxy, true = Generator(backbone, args.precision), Generator(backbone, "bf16")
    scores: dict[tuple[str, str], list[torch.Tensor]] = {}

    def score(name: str, prompt: PromptItem, images: torch.Tensor) -> None:
        texts, metadata = [prompt.text] * len(images), [prompt.metadata] * len(images)
        for reward, values in rewards.score(args.rewards, images, texts, metadata).items():
            scores.setdefault((name, reward), []).append(values)

    prompts = read_prompts(find_prompts("shapes"), "test")[: args.prompts]
    for prompt in track(prompts, f"{model}, groups", console=Console(stderr=True)):
        seeds = expand_seeds(0, prompt.id, args.candidates)
        others = expand_seeds(1, prompt.id, args.candidates)
        for steps in ODE_STEPS:
            score(_ode(args.precision, steps), prompt, proxy.generate(prompt.text, seeds, steps=steps).images)
        for recipe in RECIPES:
            solver, steps = sampler_of(model, recipe)
            for name, own in ((recipe, seeds), (f"{recipe} {AGAIN}", others)):
                # The initial noise is the first seeds', the noise of the steps that of `own`.
                start = Trajectory(initial_noise(seeds, backbone.latent_shape), solver)
                score(name, prompt, true.generate(prompt.text, own, steps=steps, start=start).images)
    proxies = [_ode(args.precision, steps) for steps in ODE_STEPS]
    return [
        {"model": model, "recipe": recipe, "reward": reward, "proxy": name.removeprefix(f"{recipe} ")}
        | vars(rank_fidelity(torch.stack(scores[name, reward]), torch.stack(scores[recipe, reward])))
        for recipe in RECIPES
        for reward in args.rewards
        for name in (*proxies, f"{recipe} {AGAIN}")
    ]


def _ode(precision: str, steps: int) -> str:
    return f"ODE, {precision.upper()}, {steps} steps"


def table(rows: Sequence[dict[str, Any]], settings: Mapping[str, Any]) -> str:
    """Markdown table of all rows, means over the rewards, with the command of the measurement."""
    lines = [
        "# Ranks of ODE candidates against stochastic trajectories",
        "",
        f"By `{command(settings)}`, on the device `{settings['device']}`:",
        f"{settings['prompts']} held-out prompts × {settings['candidates']} candidates under the base, means over",
        f"{', '.join(settings['rewards'])}. The recipes' trajectories begin at the same",
        "initial noise as the ODE candidates, in BF16. *The SDE again* has the same initial noise and other noise at",
        "each step: it shows how far the initial noise decides. Overlaps are shares of the best (worst) 4/8/12. True",
        "ranks are means over the 12 candidates ranked best (worst): perfect 6.5 / 90.5 of 96, chance 48.5.",
        "FlowGRPO-Fast has the window of a run's first iteration, steps 3 and 4 of 10.",
        "",
        *PREPARED_FOR_NVFP4,
        "",
        "| model | trajectories | proxy | Kendall | Spearman | best 4/8/12 | worst 4/8/12 | true ranks |",
        "|---|---|---|---|---|---|---|---|",
    ]
    keys = list(dict.fromkeys((row["model"], row["recipe"], row["proxy"]) for row in rows))
    for key in keys:
        found = [row for row in rows if (row["model"], row["recipe"], row["proxy"]) == key]
        mean = _mean([Fidelity(**{name: row[name] for name in Fidelity.__dataclass_fields__}) for row in found])
        best, worst = ("/".join(f"{v:.2f}" for v in o.values()) for o in (mean.top_overlap, mean.bottom_overlap))
        lines.append(
            f"| {' | '.join(key)} | {mean.kendall:.3f} | {mean.spearman:.3f} | {best} | {worst} "
            f"| {mean.top_rank:.1f} / {mean.bottom_rank:.1f} |"
        )
    return "\n".join(lines) + "\n"


def _mean(found: Sequence[Fidelity]) -> Fidelity:
    def of(name: str) -> Any:
        values = [getattr(one, name) for one in found]
        if isinstance(values[0], dict):
            return {size: sum(value[size] for value in values) / len(values) for size in values[0]}
        return sum(values) / len(values)

    return Fidelity(**{name: of(name) for name in Fidelity.__dataclass_fields__})


if __name__ == "__main__":
    main()
