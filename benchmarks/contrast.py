"""Contrast of selection: how far apart the selected best and worst are, by group size, samples kept and fidelity.

Scores a large group per held-out prompt in BF16 at full steps, and by a cheap plan. Smaller groups are random subsets
of it. Proxies of any fidelity are true ranks with normal noise. The page compares the contrast with that of a Gaussian
model, which knows the rank correlation alone. It is about selection; nothing is trained.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import torch
from paper.theory import contrast
from rich.console import Console
from rich.progress import track
from scipy.stats import norm, rankdata
from solrl_core.families import load_backbone
from solrl_core.fidelity import rank_fidelity
from solrl_core.rewards import RewardSet
from solrl_engine.precision_check import generator_at
from solrl_proto.noise import expand_seeds
from solrl_trainer.calibration.group_sizes import group_sizes
from solrl_trainer.settings.prompts import find_prompts, read_prompts
from support.precisions import OF_PRESET, PRECISIONS, solver_of
from support.results import Results, Row, command, figure_of, options, table

NAME = "contrast"
TRUE = ("bf16", 10)
STEPS = 6
SIZES = (24, 96, 384)
SIDES = (4, 12)
SPEARMANS = (0.9, 0.8, 0.7, 0.6, 0.5)
"""Rank correlations of the proxies that are made of true ranks and noise."""
EXACT = "exact ranks"


def main() -> None:
    """Measure, and write JSON, page and plot."""
    args = _options().parse_args()
    results = Results(NAME, args.out, page, {NAME: plot})
    if not args.render:
        results.found.update({key: value for key, value in vars(args).items() if key not in ("out", "render")})
        true, cheap = scores(args)
        results.keep(lambda row: False)
        for row in rows(true, cheap, f"{args.precision.upper()} {STEPS} steps"):
            results.add(row)
    results.show()


def _options() -> argparse.ArgumentParser:
    parser = options(__doc__, device="cpu")
    parser.add_argument("--model", default="mini-sana")
    parser.add_argument("--reward", default="clipscore")
    parser.add_argument("--precision", choices=PRECISIONS, default="nvfp4")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--candidates", type=int, default=max(SIZES))
    return parser


def scores(args: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    """True and cheap scores [prompts, candidates] of the same seeds."""
    backbone = load_backbone(args.model, device=args.device)
    rewards, solver = RewardSet.load([args.reward], backbone), solver_of(OF_PRESET, backbone.family)
    generators = [(generator_at(backbone, precision), steps) for precision, steps in (TRUE, (args.precision, STEPS))]
    found: list[list[torch.Tensor]] = []
    prompts = read_prompts(find_prompts("shapes"), "test")[: args.prompts]
    for prompt in track(prompts, "groups", console=Console(stderr=True)):
        seeds = expand_seeds(0, prompt.id, args.candidates)
        texts, metadata = [prompt.text] * len(seeds), [prompt.metadata] * len(seeds)
        found.append([])
        for generator, steps in generators:
            images = generator.generate(prompt.text, seeds, steps=steps, solver=solver).images
            found[-1].append(rewards.score([args.reward], images, texts, metadata)[args.reward])
    true, cheap = (torch.stack(one) for one in zip(*found, strict=True))
    return true, cheap


def rows(true: torch.Tensor, cheap: torch.Tensor, plan: str) -> list[Row]:
    """Rows of a plan's proxy, of exact ranks, and of degraded ones."""
    proxies = {plan: cheap, EXACT: true}
    proxies |= {f"degraded to {spearman:g}": degraded(true, spearman) for spearman in SPEARMANS}
    found = []
    for name, proxy in proxies.items():
        spearman = rank_fidelity(proxy, true).spearman
        for one in group_sizes(proxy, None, true, kept=true.shape[1], ends=SIDES):
            if one.candidates in SIZES:
                found.append(
                    {
                        "proxy": name,
                        "spearman": spearman,
                        "candidates": one.candidates,
                        "keep": one.keep,
                        "contrast": [one.contrast.value, one.contrast.low, one.contrast.high],
                        "predicted": contrast(spearman, one.candidates, one.keep // 2),
                    }
                )
    return found


def degraded(true: torch.Tensor, spearman: float) -> torch.Tensor:
    """Normal values in the order of true scores [prompts, N], with so much noise that ranks correlate as wanted."""
    correlation = 2 * np.sin(np.pi * spearman / 6)
    ordered = norm.ppf((rankdata(true.numpy(), axis=1) - 0.5) / true.shape[1])
    noise = np.random.default_rng(0).standard_normal(ordered.shape)
    return torch.from_numpy(correlation * ordered + (1 - correlation**2) ** 0.5 * noise).float()


def page(found: Mapping[str, Any]) -> str:
    """Markdown page, with the command of the measurement."""
    by_proxy: dict[str, list[Row]] = {}
    for row in found["rows"]:
        by_proxy.setdefault(row["proxy"], []).append(row)
    settings = [(row["candidates"], row["keep"]) for row in next(iter(by_proxy.values()))]
    cells = [
        [name, f"{own[0]['spearman']:.2f}", *(_cell(row) for row in own)]
        for name, own in sorted(by_proxy.items(), key=lambda one: -one[1][0]["spearman"])
    ]
    lines = [
        "# What fidelity buys",
        "",
        f"By `{command(NAME, _options(), found)}`, on the device `{found['device']}`:",
        f"{found['prompts']} held-out prompts × {found['candidates']} candidates of {found['model']},",
        f"scored by {found['reward']} in BF16 at {TRUE[1]} steps. Contrast: mean true score of the selected best less",
        "that of the selected worst, in standard deviations of the group, with its 95 % interval over prompts, and as",
        "a Gaussian model predicts it from the Spearman correlation alone. Smaller groups are random subsets.",
        "",
        "**This is the contrast of selection, not training.** How many iterations a contrast saves is",
        "[another table](paper.md#time-to-a-reward).",
        "",
        *table(["proxy", "Spearman", *(f"{keep} of {size}" for size, keep in settings)], cells),
        "",
        _above(found["rows"]),
        "",
        f"![Contrast by Spearman correlation]({NAME}.png)",
    ]
    return "\n".join(lines) + "\n"


def _above(rows: Sequence[Row]) -> str:
    shares = [row["predicted"] / row["contrast"][0] - 1 for row in rows]
    return f"Predictions exceed measurements by {min(shares):.0%} to {max(shares):.0%}."


def _cell(row: Row) -> str:
    mean, low, high = row["contrast"]
    return f"{mean:.2f} [{low:.2f}, {high:.2f}], predicted {row['predicted']:.2f}"


def plot(found: Mapping[str, Any], path: Path) -> None:
    """Contrast over the rank correlation: points as measured, lines as predicted."""
    along = np.linspace(0.4, 1, 13)
    with figure_of(path, ncols=len(SIDES), figsize=(9, 4), sharey=True) as (_, axes):
        for side, each in zip(SIDES, axes.flat, strict=True):
            for number, size in enumerate(SIZES):
                own = [row for row in found["rows"] if (row["candidates"], row["keep"]) == (size, 2 * side)]
                if own:
                    each.plot(along, [contrast(float(one), size, side) for one in along], color=f"C{number}")
                    each.plot(
                        [row["spearman"] for row in own],
                        [row["contrast"][0] for row in own],
                        "o",
                        color=f"C{number}",
                        label=f"{size} candidates",
                    )
            each.set(title=f"{2 * side} kept", xlabel="Spearman correlation of proxy and true scores")
        axes[0, 0].set(ylabel="best less worst, standard deviations")
        axes[0, 0].legend(frameon=False)


if __name__ == "__main__":
    main()
