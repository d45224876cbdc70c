"""Table 7: long runs, and the time in which each family reaches shares of the baseline's plateau."""

from typing import Any

import numpy as np

from paper.arms import Arm, Context, averaged, best, curve, rise
from paper.figures import Figure, Table
from paper.finished import Finished
from paper.intervals import over_seeds
from paper.pace import pace, prices
from paper.tables.families import BASELINE, BF16, FAMILIES, FITTED, OURS, measured

REWARDS = ("pickscore", "imagereward")
SEEDS = (1, 2, 3, 4)
ITERATIONS = 250
CHANGES = {"iterations": ITERATIONS, "optimizer.cosine_iterations": ITERATIONS, "evaluate.every": 10}
SHARES = (0.5, 0.7, 0.9, 0.95, 0.99)
ENDS = 10
"""Iterations at either end of a run over which its gradients are averaged."""


def arms(context: Context) -> dict[tuple[str, str], Arm]:
    """(family, reward) → arm."""
    return {
        (name, reward): context.arm(FAMILIES[name], CHANGES, reward=reward, seeds=SEEDS)
        for reward in REWARDS
        for name in (BASELINE, BF16, OURS)
    }


def figures(context: Context) -> dict[str, Any]:
    """The table."""
    found = arms(context)
    by_family = {name: [found[name, reward] for reward in REWARDS] for name in (BASELINE, BF16, OURS)}
    costs = prices({name: one[0] for name, one in by_family.items()}, BASELINE) | measured((*by_family, FITTED))
    iterations = {
        name: {f"{share:.0%}": pace(by_family[name], by_family[BASELINE], share, height=best) for share in SHARES}
        for name in (BF16, OURS)
    }
    bf16, ours = (
        averaged([np.array([rise(run, arm.reward) for run in arm.runs]) for arm in by_family[name]])
        for name in (BF16, OURS)
    )
    return {
        "gains": Table(
            ["family", "trained on"],
            {
                key: {
                    "best, sd": arm.each(rise),
                    "at iteration": Figure(float(np.mean([_peak(run, arm.reward) for run in arm.runs])), ".0f"),
                    "end, sd": arm.gain_of_ceiling(),
                    "gradient norm": _begin_and_end(arm, "grad_norm", ".3f"),
                    "loss": _begin_and_end(arm, "loss", ".2f"),
                }
                for key, arm in found.items()
            },
        ),
        "best less BF16": Figure(over_seeds(ours - bf16)),
        "curves": {", ".join(key): _mean_curve(arm) for key, arm in found.items()},
        "iterations": Table(["× iterations"], iterations),
        "compute": Table(
            ["× compute"],
            {
                f"{name}, {clock}": {share: figure.over(cost[name]) for share, figure in one.items()}
                for name, one in {**iterations, FITTED: iterations[OURS]}.items()
                for clock, cost in costs.items()
                if name in cost
            },
        ),
    }


def _peak(run: Finished, reward: str) -> int:
    points = curve(run, reward)
    return next(version for version, value in points if value == best(points))


def _begin_and_end(arm: Arm, figure: str, spec: str) -> tuple[Figure, Figure]:
    """Mean of a figure over the seeds' first and last iterations."""
    lines = [run.iterations for run in arm.runs]
    ends = ([one[:ENDS] for one in lines], [one[-ENDS:] for one in lines])
    first, last = (Figure(float(np.mean([[line[figure] for line in one] for one in end])), spec) for end in ends)
    return first, last


def _mean_curve(arm: Arm) -> list[tuple[int, float, float, float]]:
    """Iteration and gain, a mean over seeds with the limits of its interval, by evaluation."""
    versions = [version for version, _ in curve(arm.runs[0], arm.reward)]
    rises = [[value for _, value in curve(run, arm.reward)] for run in arm.runs]
    within = [[run.within[arm.reward]] for run in arm.runs]
    found = map(over_seeds, ((np.array(rises) - np.array(rises)[:, :1]) / within).T)
    return [(version, one.mean, one.low, one.high) for version, one in zip(versions, found, strict=True)]
