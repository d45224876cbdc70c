"""Plots of the page: learning curves of the rollout families, and the gain by size of the group."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from paper.compute import SHAPES, measured_costs, passes_of_iteration
from paper.tables import families, sweeps
from paper.tables.common import Context, gain

HOUR = 3600


def learning_curves(context: Context, path: Path) -> bool:
    """Held-out reward over weighted compute: pale lines are runs, a strong one their mean. False without any run."""
    programme = context.tuned
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    costs = measured_costs(programme.shape, context.results)
    for number, (name, recipe) in enumerate(families.FAMILIES.items()):
        runs = context.finished(programme.over_seeds(recipe))
        for run in runs:
            _draw(axes, families.curve(run, programme.reward), _hours(costs, run), f"C{number}", alpha=0.3)
        if runs:
            curves = [families.curve(run, programme.reward) for run in runs]
            mean = [
                (points[0][0], float(np.mean([value for _, value in points]))) for points in zip(*curves, strict=True)
            ]
            label = f"{name} ({len(runs)} of {len(programme.seeds)} seeds)"
            _draw(axes, mean, _hours(costs, runs[0]), f"C{number}", label=label, linewidth=2)
    shape = SHAPES[programme.shape]
    axes.set(
        xlabel=f"denoising and training at the shape of {shape}, hours of one H200",
        ylabel=f"held-out {programme.reward}",
    )
    return _save(figure, axes, path)


def _hours(costs: Any, run: Any) -> float:
    return float(costs.seconds(passes_of_iteration(run.config)) / HOUR)


def _draw(axes: Any, curve: list[tuple[int, float]], hours: float, colour: str, **style: Any) -> None:
    axes.plot([at * hours for at, _ in curve], [value for _, value in curve], color=colour, **style)


def group_sizes(context: Context, path: Path) -> bool:
    """Gain over the candidates of a prompt, a line for each number of kept samples. False without any run."""
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    for number, side in enumerate(sweeps.SIDES):
        found = {
            candidates: gain(context, sweeps.sol_rl(context, sweeps.group(candidates, side)), context.programme.reward)
            for candidates in sweeps.CANDIDATES
        }
        known = {candidates: one for candidates, one in found.items() if one is not None}
        if known:
            means = [one.mean for one in known.values()]
            ends = [[one.mean - one.low for one in known.values()], [one.high - one.mean for one in known.values()]]
            apart = [candidates + number - 1 for candidates in known]  # so that intervals do not cover each other
            limits = np.where(np.isfinite(ends), ends, 0.0)
            axes.errorbar(apart, means, limits, color=f"C{number}", marker="o", capsize=2, label=f"{side} a side")
    axes.set(xlabel="candidates per prompt", ylabel=f"gain in {context.programme.reward}, sd", xticks=sweeps.CANDIDATES)
    return _save(figure, axes, path)


def _save(figure: Any, axes: Any, path: Path) -> bool:
    drawn = axes.has_data()
    if drawn:
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    plt.close(figure)
    return bool(drawn)
