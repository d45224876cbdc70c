"""The arms that tables compare: runs of one recipe with changes, one for each seed, and what they measured."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from solrl_trainer.settings.config import RunConfig

from paper.ceiling import ceiling_of
from paper.experiments import AS_IS, Changes, Experiment, Programme
from paper.figures import Figure
from paper.finished import Finished, Runs
from paper.intervals import Estimate, Values, over_seeds, over_seeds_and_prompts
from paper.tuning import SEED, USUAL, Choice, Tuning, affordable, choose, trials

Curve = Sequence[tuple[int, float]]
"""Held-out reward by iterations, the base first."""


@dataclass(frozen=True, eq=False)
class Context:
    """Settings of all tables, and the finished runs."""

    programme: Programme
    runs: Runs

    def choice(self, tuning: Tuning = USUAL) -> Choice | None:
        """The learning rate of these trials; None while one is missing."""
        return choose(self.programme, tuning, self.runs)

    @cached_property
    def ceilings(self) -> dict[str, float]:
        """Mean gain of true scenes over the base of the programme's model, by reward that was measured.

        Over the base as the tables' runs scored it: in trials, older kernels gave it other deviations.
        """
        model = self.programme.model
        judged = (run for run in self.runs.values() if run.config.seed != SEED and run.stopped is None)
        run = next((run for run in judged if run.config.model == model), None)
        scores = ceiling_of(model, run.prompts) if run else {}
        return {
            reward: float(((scores[reward] - run.before[reward]) / run.within[reward]).mean())
            for reward in self.programme.rewards
            if reward in scores
        }

    def arm(
        self,
        recipe: str,
        changes: Changes = AS_IS,
        *,
        reward: str | None = None,
        seeds: Sequence[int] | None = None,
        tuning: Tuning = USUAL,
    ) -> "Arm":
        """Runs of a recipe at the learning rate that trials chose, or at the preset's while a trial is missing.

        Args:
            recipe: recipe of the preset.
            changes: settings over those of the programme; they may have a learning rate, too.
            reward: trained reward, by default the programme's.
            seeds: training seeds, by default the programme's.
            tuning: the trials.
        """
        choice = self.choice(tuning)
        wanted = {**({"optimizer.learning_rate": choice.rate} if choice else {}), **changes}
        runs = (
            self.programme.experiment(recipe, seed, wanted, reward=reward) for seed in seeds or self.programme.seeds
        )
        return Arm(self, tuning, tuple(runs))

    def at_equal_compute(self, tuning: Tuning, reward: str) -> "Arm":
        """Runs of an algorithm with its own trials, and with the compute of a run of Sol-RL."""
        programme, count = self.programme, affordable(self.programme, tuning)
        # Evaluations at equal compute too: DanceGRPO's many cheap iterations would have three times as many.
        every = round(programme.every * count / programme.iterations) or programme.every
        changes = {**tuning.changes, "iterations": count, "evaluate.every": every}
        return self.arm(tuning.recipe, changes, reward=reward, tuning=tuning)


@dataclass(frozen=True, eq=False)
class Arm:
    """Runs of one recipe, one for each seed.

    Attributes:
        context: where they are found.
        tuning: trials that choose their learning rate.
        experiments: the runs, finished or not.
    """

    context: Context
    tuning: Tuning
    experiments: tuple[Experiment, ...]

    @property
    def reward(self) -> str:
        """The trained reward."""
        return self.experiments[0].reward

    @property
    def recipe(self) -> str:
        """Recipe of the preset."""
        return self.experiments[0].preset.split("/")[1]

    @property
    def config(self) -> RunConfig:
        """Settings of the first seed's run."""
        return self.experiments[0].config

    @cached_property
    def by_seed(self) -> dict[int, Finished]:
        """The finished runs that were judged, by seed."""
        found = {one.seed: self.context.runs.get(one.name) for one in self.experiments}
        return {seed: run for seed, run in found.items() if run and run.stopped is None}

    @property
    def runs(self) -> list[Finished]:
        """The finished runs that were judged."""
        return list(self.by_seed.values())

    @property
    def complete(self) -> bool:
        """Whether every seed has one."""
        return len(self.by_seed) == len(self.experiments)

    def _figure(self, value: Estimate | None, spec: str = "+.3f") -> Figure:
        """A figure of all runs, with what is missing."""
        count, found = len(self.experiments), (self.context.runs.get(one.name) for one in self.experiments)
        stopped = sum(run.stopped is not None for run in found if run)
        notes = [f"{value.seeds} of {count} seeds"] if value and value.seeds < count else []
        return Figure(value, spec, (*notes, *([f"{stopped} stopped"] if stopped else [])))

    def final(self, reward: str) -> Figure:
        """Final reward, a mean over seeds."""
        return Figure(float(np.mean([run.after[reward].mean() for run in self.runs])) if self.runs else None, ".4f")

    def gains(self, reward: str) -> Values:
        """Gains [seeds, prompts] in standard deviations of the base within a prompt."""
        return np.stack([run.gain(reward) for run in self.runs])

    def gain(self, reward: str | None = None) -> Figure:
        """Gain of a reward, by default the trained one."""
        return self._figure(over_seeds_and_prompts(self.gains(reward or self.reward)) if self.runs else None)

    def gain_of_ceiling(self) -> Figure:
        """Gain of the trained reward, with its share of the ceiling."""
        own, ceiling = self.gain(), self.context.ceilings.get(self.reward)
        alike = self.config.model == self.context.programme.model
        if own.value is None or ceiling is None or not alike:
            return own
        return Figure(own.value, notes=(*own.notes, f"{own.value.mean / ceiling:.0%}"))

    def less(self, other: "Arm") -> Figure:
        """Gain of the trained reward less that of another arm, paired by seed and prompt."""
        found, count = self.apart(other), min(len(self.experiments), len(other.experiments))
        notes = (f"{len(found)} of {count} seeds",) if 0 < len(found) < count else ()
        return Figure(over_seeds_and_prompts(found) if len(found) else None, notes=notes)

    def apart(self, other: "Arm") -> Values:
        """Gains less those of another arm [seeds, prompts], for the seeds that both have finished."""
        return np.array([one.gain(self.reward) - two.gain(self.reward) for one, two in paired(self, other)])

    def each(self, measure: Callable[[Finished, str], float], spec: str = "+.3f") -> Figure:
        """A figure of each run and the trained reward, over seeds."""
        found = [measure(run, self.reward) for run in self.runs]
        return self._figure(over_seeds(np.array(found)) if found else None, spec)

    def ranks(self) -> dict[int, list[float]]:
        """Spearman correlation of exploration with full steps in BF16, by iteration and run."""
        found: dict[int, list[float]] = {}
        for run in self.runs:
            for line in run.fidelity:
                found.setdefault(line["version"], []).append(line["spearman"])
        return found


def paired(*arms: Arm) -> list[tuple[Finished, ...]]:
    """The runs of all arms by seed, for the seeds that all have finished."""
    first, *others = (arm.by_seed for arm in arms)
    return [(run, *(one[seed] for one in others)) for seed, run in first.items() if all(seed in one for one in others)]


def averaged(by_reward: Sequence[Values]) -> Values | None:
    """Mean over rewards of values of the same seeds; None if some are missing."""
    alike = len({values.shape for values in by_reward}) == 1 and by_reward[0].size
    return np.mean(by_reward, axis=0) if alike else None


def needed(arms: Iterable[Arm], *, whole: bool = False) -> list[Experiment]:
    """The trials of arms and, once these have chosen, the runs; `whole`: the runs in any case."""
    found: list[Experiment] = []
    for arm in arms:
        found += trials(arm.context.programme, arm.tuning).values()
        if whole or arm.context.choice(arm.tuning):
            found += arm.experiments
    return list(dict.fromkeys(found))


def curve(run: Finished, reward: str) -> Curve:
    """Held-out reward of a run by iterations."""
    return [(version, means[reward]) for version, means in run.curve]


def last(points: Curve) -> float:
    """Reward at the end of a learning curve."""
    return points[-1][1]


def best(points: Curve) -> float:
    """Highest reward of a learning curve."""
    return max(value for _, value in points)


def rise(run: Finished, reward: str) -> float:
    """Highest held-out reward of a run's evaluations less that of the base, in standard deviations of the base."""
    points = curve(run, reward)
    return (best(points) - points[0][1]) / run.within[reward]


def fall(run: Finished, reward: str) -> float:
    """Highest held-out reward of a run's evaluations less the last, in standard deviations of the base."""
    points = curve(run, reward)
    return (best(points) - last(points)) / run.within[reward]
