"""Plots of the page: learning curves of the rollout families, and the gain by size of the group."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from paper.compute import SHAPES, costs_of, passes_of_iteration
from paper.tables import families, pace, sweeps
from paper.tables.common import Context

HOUR = 3600


def learning_curves(context: Context, path: Path) -> bool:
    """Held-out reward over weighted compute: pale lines are runs, a strong one their mean. False without any run."""
    trained = families.rewards(context)
    rows = math.ceil(len(trained) / 2)
    figure, grid = plt.subplots(rows, 2, figsize=(11, 4 * rows), layout="constrained", squeeze=False)
    for axes, reward in zip(grid.flat, trained, strict=False):
        _family_curves(context, axes, reward)
    for axes in grid.flat[len(trained) :]:
        axes.set_axis_off()
    figure.supxlabel(f"denoising and training at the shape of {SHAPES[context.programme.shape]}, hours of one H200")
    return _save(figure, [axes for axes in grid.flat if axes.has_data()], path)


def _family_curves(context: Context, axes: Any, reward: str) -> None:
    programme = context.tuned
    costs = costs_of(programme.shape, context.results)
    for number, (name, recipe) in enumerate(families.FAMILIES.items()):
        runs = context.finished(programme.over_seeds(recipe, reward=reward))
        for run in runs:
            _draw(axes, pace.curve(run, reward), _hours(costs, run), f"C{number}", alpha=0.3)
        if runs:
            curves = [pace.curve(run, reward) for run in runs]
            mean = [
                (points[0][0], float(np.mean([value for _, value in points]))) for points in zip(*curves, strict=True)
            ]
            label = f"{name} ({len(runs)} of {len(programme.seeds)} seeds)"
            _draw(axes, mean, _hours(costs, runs[0]), f"C{number}", label=label, linewidth=2)
    axes.set(ylabel=f"held-out {reward}")


def _hours(costs: Any, run: Any) -> float:
    return float(costs.seconds(passes_of_iteration(run.config)) / HOUR)


def _draw(axes: Any, curve: list[tuple[int, float]], hours: float, colour: str, **style: Any) -> None:
    axes.plot([at * hours for at, _ in curve], [value for _, value in curve], color=colour, **style)


def group_sizes(context: Context, path: Path) -> bool:
    """Gain less the usual setting's over the candidates of a prompt, a line for each number of kept samples.

    False without any run.
    """
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    apart = sweeps.less_usual(context)
    for number, side in enumerate(sweeps.SIDES):
        known = {
            candidates: apart[name].estimate
            for candidates in sweeps.CANDIDATES
            if (name := sweeps.sized(candidates, side)) in apart
        }
        if known:
            means = [one.mean for one in known.values()]
            ends = [[one.mean - one.low for one in known.values()], [one.high - one.mean for one in known.values()]]
            apart = [candidates + number - 1 for candidates in known]  # so that intervals do not cover each other
            limits = np.where(np.isfinite(ends), ends, 0.0)
            axes.errorbar(apart, means, limits, color=f"C{number}", marker="o", capsize=2, label=f"{side} a side")
    if axes.has_data():
        axes.axhline(0, color="0.8", linewidth=1, zorder=0)
    less = f"less that of {sweeps.USUAL} candidates, {max(sweeps.SIDES)} a side"
    label = f"gain in {context.programme.reward}, sd,\n{less}"
    axes.set(xlabel="candidates per prompt", ylabel=label, xticks=sweeps.CANDIDATES)
    return _save(figure, [axes] if axes.has_data() else [], path)


def _save(figure: Any, drawn: Sequence[Any], path: Path) -> bool:
    for axes in drawn:
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    if drawn:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
    plt.close(figure)
    return bool(drawn)
