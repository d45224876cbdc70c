"""Pace of arms: iterations and compute in which they reach a reward, against those of others."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from paper.arms import Arm, Curve, curve, last, paired
from paper.compute import SHAPES, preset_fraction, seconds_of
from paper.figures import Figure
from paper.intervals import Estimate, over_seeds

Height = Callable[[Curve], float]


def first_reached(points: Curve, target: float) -> float:
    """Iterations after which a learning curve first reaches `target`, linear between evaluations; inf if never."""
    for (before, low), (after, high) in pairwise(points):
        if low >= target:
            return float(before)
        if high >= target:
            return before + (after - before) * (target - low) / (high - low)
    return math.inf


def times(arms: Sequence[Arm], goal: Arm, share: float, height: Height = last) -> list[list[float]]:
    """Iterations in which arms reach a share of the gain at the `height` of the goal's curve, by seed and arm.

    Only seeds that all of them have finished.
    """
    found = []
    for *runs, end in paired(*arms, goal):
        points = curve(end, goal.reward)
        target = points[0][1] + share * (height(points) - points[0][1])
        found.append([first_reached(curve(run, goal.reward), target) for run in runs])
    return found


def pace(
    ours: Iterable[Arm], theirs: Iterable[Arm], share: float = 1.0, *, goals: Iterable[Arm] = (), height: Height = last
) -> Figure:
    """Iterations of arms over those of ours, until both reach a share of the gain of a goal, by default of theirs.

    The geometric mean with its interval over seeds. Each list has an arm for each reward. A seed's rewards share its
    prompts, so its mean over rewards is one value. No figure if a run never gets there.
    """
    theirs = list(theirs)
    both = [
        times([one, other], goal, share, height)
        for one, other, goal in zip(ours, theirs, list(goals) or theirs, strict=True)
    ]
    if not both or not both[0] or len({len(one) for one in both}) > 1:
        return Figure(None)
    needed, spent = np.moveaxis(np.array(both), -1, 0)
    if flat := int((spent == 0).sum()):
        return Figure(None, notes=(f"the baseline did not rise in {flat} of {spent.size} runs",))
    reached = np.isfinite(needed) & np.isfinite(spent) & (needed > 0)
    if not reached.all():
        return Figure(None, notes=(f"reached by {reached.sum()} of {reached.size} runs",))
    logs = over_seeds(np.log(spent / needed).mean(0))
    limits = (float(np.exp(value)) for value in (logs.mean, logs.low, logs.high))
    return Figure(Estimate(*limits, logs.seeds), ".2f")


def prices(arms: Mapping[str, Arm], baseline: str) -> dict[str, dict[str, float]]:
    """Compute of an iteration by large model's shape and arm, in iterations of the baseline.

    With the noise levels that the runs train, and with those that the large model's preset of the recipe trains if that
    makes a difference: the fewer are trained, the more a larger group costs.
    """
    found: dict[str, dict[str, float]] = {}
    for shape, name in SHAPES.items():
        for preset, label in ((False, ""), (True, ", its preset")):
            seconds = {
                key: seconds_of(arm.config, shape, preset_fraction(shape, arm.recipe) if preset else None)
                for key, arm in arms.items()
            }
            costs = {key: one / seconds[baseline] for key, one in seconds.items()}
            if costs not in found.values():
                found[f"{name.partition(' ')[0]}{label}"] = costs
    return found
