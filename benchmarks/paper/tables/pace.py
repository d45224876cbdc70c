"""Pace of a family: iterations and compute in which it reaches a reward, against those of the baseline."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from solrl_trainer.settings.config import RunConfig

from paper.compute import SHAPES, costs_of, passes_of_iteration, preset_fraction
from paper.experiments import Experiment
from paper.finished import Finished
from paper.intervals import Estimate, over_seeds
from paper.tables.common import NOT_RUN, Context, interval

Clock = Callable[[RunConfig], float]
"""Compute of one iteration of a run with these settings."""
Curve = Sequence[tuple[int, float]]


@dataclass(frozen=True)
class SpeedUp:
    """Iterations of the baseline over those of a family, until both have the same reward.

    Attributes:
        ratio: geometric mean over the seeds that reach the reward, with its interval over seeds; None without any.
        note: why seeds are missing.
    """

    ratio: Estimate | None
    note: str = ""

    def __str__(self) -> str:
        if self.ratio is None:
            return self.note or NOT_RUN
        return f"{interval(self.ratio)}{f', {self.note}' if self.note else ''}"

    def over(self, cost: float) -> "SpeedUp":
        """The same in compute, where an iteration of the family costs so many of the baseline's."""
        return SpeedUp(scaled(self.ratio, 1 / cost) if self.ratio else None, self.note)


def scaled(one: Estimate, factor: float) -> Estimate:
    """An estimate times a factor above 0."""
    return Estimate(one.mean * factor, one.low * factor, one.high * factor, one.seeds)


def curve(run: Finished, reward: str) -> list[tuple[int, float]]:
    """Held-out reward by iterations."""
    return [(version, means[reward]) for version, means in run.curve]


def last(points: Curve) -> float:
    """Reward at the end of a learning curve."""
    return points[-1][1]


def best(points: Curve) -> float:
    """Highest reward of a learning curve."""
    return max(value for _, value in points)


def first_reached(points: Curve, target: float) -> float | None:
    """Iterations after which a learning curve first reaches `target`, linear between evaluations; None if never."""
    for (before, low), (after, high) in pairwise(points):
        if low >= target:
            return float(before)
        if high >= target:
            return before + (after - before) * (target - low) / (high - low)
    return None


def log_ratios(
    context: Context,
    ours: Sequence[Experiment],
    baseline: Sequence[Experiment],
    reward: str,
    share: float = 1.0,
    goal: Sequence[Experiment] | None = None,
    height: Callable[[Curve], float] = last,
) -> list[float]:
    """Logarithm of the baseline's iterations over ours, by seed that all have finished.

    The target is this share of the gain at the `height` of the curve of `goal`, by default the baseline's last point.
    Infinite where one of the two never reaches it, not a number where `goal` did not rise.
    """
    found = []
    for experiments in zip(ours, baseline, goal or baseline, strict=True):
        runs = context.finished(experiments)
        if len(runs) < len(experiments):
            continue
        mine, theirs, points = (curve(run, reward) for run in runs)
        target = points[0][1] + share * (height(points) - points[0][1])
        spent, needed = (first_reached(one, target) for one in (theirs, mine))
        if spent == 0:
            found.append(math.nan)
        else:
            found.append(math.log(spent / needed) if spent and needed else math.inf if needed else -math.inf)
    return found


def speed_up(logs: Sequence[float]) -> SpeedUp:
    """The speed-up from its logarithms by seed."""
    flat, reached = sum(map(math.isnan, logs)), [one for one in logs if math.isfinite(one)]
    if flat:
        return SpeedUp(None, f"the baseline did not rise in {flat} of {len(logs)} runs")
    note = f"reached in {len(reached)} of {len(logs)} runs" if len(reached) < len(logs) else ""
    return SpeedUp(_exponential(reached) if reached else None, note)


def pooled(by_reward: Sequence[Sequence[float]]) -> SpeedUp:
    """The speed-up over all rewards. A seed's rewards share its prompts, so its mean over rewards is one value."""
    logs = np.array(by_reward) if by_reward and len({len(one) for one in by_reward}) == 1 else np.zeros((0, 0))
    if not logs.size:
        return SpeedUp(None)
    if not (reached := np.isfinite(logs)).all():
        return SpeedUp(None, f"reached by {reached.sum()} of {reached.size} runs")
    return SpeedUp(_exponential(logs.mean(0)))


def _exponential(logs: Sequence[float]) -> Estimate:
    found = over_seeds(np.array(logs))
    return Estimate(*(float(np.exp(value)) for value in (found.mean, found.low, found.high)), found.seeds)


def clocks_of(context: Context) -> dict[str, Clock]:
    """Measures of an iteration's compute by name: as trained here, and with as many noise levels as the preset trains.

    The fraction of noise levels decides how much of an iteration is training, which all families share: the smaller
    it is, the more a larger group costs.
    """
    clocks: dict[str, Clock] = {}
    for shape, name in SHAPES.items():
        seconds, short = costs_of(shape, context.results).seconds, name.partition(" ")[0]
        own = context.tuned.experiment("sol_rl", context.programme.seeds[0]).config.algorithm.timestep_fraction
        for fraction in dict.fromkeys((own, preset_fraction(shape))):
            clocks[f"{short}, {fraction:g}"] = lambda config, seconds=seconds, fraction=fraction: seconds(
                passes_of_iteration(config, fraction)
            )
    return clocks
