"""Cells and rows that the tables share. A table is a function of finished runs; what is missing is said in its cell."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from paper.ceiling import ceiling_of
from paper.experiments import Experiment, Programme
from paper.finished import Finished, Runs
from paper.intervals import Estimate, Values, over_seeds_and_prompts
from paper.tuning import Choice, choose, trials

NOT_RUN = "not run"
Part = tuple[str | None, Mapping[str, Any]]
"""Part of a table: trained reward, by default the programme's, and changes to its settings."""
TUNED_FOR = "diffusionnft"
"""Recipe whose trials choose the learning rate of tables 2 to 5: their baseline. One rate, so that one axis varies."""


@dataclass(frozen=True)
class Context:
    """Contents of the tables.

    Attributes:
        programme: settings of all tables.
        runs: finished runs.
        results: folder of the stored results of other benchmarks.
    """

    programme: Programme
    runs: Runs
    results: Path

    @cached_property
    def choice(self) -> Choice | None:
        """The learning rate of tables 2 to 5; None while one of its trials is missing."""
        return choose(self.programme, TUNED_FOR, self.runs, self.results)

    def ceiling(self, reward: str) -> Values | None:
        """Gain [prompts] of true scenes over the base of the programme's model; None if it was not measured."""
        model = self.programme.model
        for run in self.runs.values():
            if run.config.model == model and reward in run.before:
                scores = (ceiling_of(model, run.prompts, self.results) or {}).get(reward)
                return None if scores is None else (scores - run.before[reward]) / run.within[reward]
        return None

    @cached_property
    def tuned(self) -> Programme:
        """The programme at that learning rate, or at its presets' while a trial is missing."""
        rate = {"optimizer.learning_rate": self.choice.rate} if self.choice else {}
        return replace(self.programme, changes={**self.programme.changes, **rate})

    def after_trials(self, recipes: Iterable[str], parts: Iterable[Part], *, whole: bool) -> list[Experiment]:
        """The trials and, once they have chosen, the runs of recipes in parts at `tuned`; `whole`: in any case."""
        tried = list(trials(self.programme, TUNED_FOR, self.results).values())
        if not self.choice and not whole:
            return tried
        runs = ((reward, changes, recipe) for reward, changes in parts for recipe in recipes)
        return tried + [one for r, changes, recipe in runs for one in self.tuned.over_seeds(recipe, changes, reward=r)]

    def finished(self, experiments: Iterable[Experiment]) -> list[Finished]:
        """The finished ones of these runs that were judged, in their order."""
        found = (self.runs.get(one.name) for one in experiments)
        return [run for run in found if run is not None and run.stopped is None]

    def stopped(self, experiments: Iterable[Experiment]) -> list[Finished]:
        """Those that stopped at a loss or gradient that is not finite."""
        found = (self.runs.get(one.name) for one in experiments)
        return [run for run in found if run is not None and run.stopped is not None]


@dataclass(frozen=True)
class Section:
    """A table of the page: Markdown below its heading, and the same figures as JSON."""

    title: str
    lines: Sequence[str]
    data: dict[str, Any] = field(default_factory=dict)


def gains(runs: Sequence[Finished], reward: str) -> Values:
    """Gains [seeds, prompts] in standard deviations of the base within a prompt."""
    return np.stack([run.gain(reward) for run in runs])


def gain(context: Context, experiments: Sequence[Experiment], reward: str) -> Estimate | None:
    """Gain of a reward over all finished seeds; None without any."""
    runs = context.finished(experiments)
    return over_seeds_and_prompts(gains(runs, reward)) if runs else None


def gain_text(context: Context, experiments: Sequence[Experiment], reward: str) -> str:
    """A gain with its interval and its share of the ceiling, and how many seeds it has if not all."""
    own, ceiling = gain(context, experiments, reward), context.ceiling(reward)
    said = cell(context, experiments, own)
    alike = experiments[0].config.model == context.programme.model
    return said if own is None or ceiling is None or not alike else f"{said}, {own.mean / ceiling.mean():.0%}"


def ceiling_text(context: Context, rewards: Iterable[str]) -> list[str]:
    """Sentences about the ceilings of these rewards, as lines."""
    found = {reward: one for reward in rewards if (one := context.ceiling(reward)) is not None}
    if not found:
        return []
    said = ", ".join(f"{one.mean():+.2f} with {reward}" for reward, one in found.items())
    return [
        "Per cent beside a gain: its share of the ceiling, the gain of true scenes of the prompts, passed through the",
        f"autoencoder of {context.programme.model}: {said}.",
    ]


def pairs(
    context: Context, ours: Sequence[Experiment], theirs: Sequence[Experiment], reward: str
) -> tuple[Values, Values] | None:
    """Gains [seeds, prompts] of two lists of experiments, for the seeds that both have finished; None without any."""
    both = [
        (first[0], second[0])
        for one, other in zip(ours, theirs, strict=True)
        if (first := context.finished([one])) and (second := context.finished([other]))
    ]
    if not both:
        return None
    return gains([one for one, _ in both], reward), gains([other for _, other in both], reward)


def difference(
    context: Context, ours: Sequence[Experiment], theirs: Sequence[Experiment], reward: str
) -> Estimate | None:
    """Difference of two gains, paired by seed and prompt; None if no seed has both."""
    both = pairs(context, ours, theirs, reward)
    return over_seeds_and_prompts(both[0] - both[1]) if both else None


def final(context: Context, experiments: Sequence[Experiment], reward: str) -> str:
    """Final reward, averaged over the finished seeds."""
    runs = context.finished(experiments)
    return f"{np.mean([run.after[reward].mean() for run in runs]):.4f}" if runs else NOT_RUN


def cell(context: Context, experiments: Sequence[Experiment], estimate: Estimate | None) -> str:
    """A gain with its interval, and how many seeds it has if not all."""
    stopped, notes = len(context.stopped(experiments)), []
    if estimate is not None and estimate.seeds < len(experiments):
        notes.append(f"{estimate.seeds} of {len(experiments)} seeds")
    if stopped:
        notes.append(f"{stopped} stopped")
    if estimate is None and stopped:
        return f"{stopped} stopped: loss or gradient not finite"
    said = signed(estimate)
    return f"{said} ({', '.join(notes)})" if notes else said


def rate_text(context: Context) -> list[str]:
    """The learning rate of tables 2 to 5, as a sentence on a line."""
    if context.choice is None:
        return []
    return [f"Learning rate {context.choice.rate:g} for all runs, which the trials of table 1 chose for DiffusionNFT."]


def signed(estimate: Estimate | None) -> str:
    """Mean and interval with signs, or "not run"."""
    if estimate is None:
        return NOT_RUN
    if not estimate.known:
        return f"{estimate.mean:+.3f} [no limit]"
    return f"{estimate.mean:+.3f} [{estimate.low:+.3f}, {estimate.high:+.3f}]"


def share_text(share: Estimate) -> str:
    """A share with its interval, in per cent."""
    if not share.known:
        return f"{share.mean:+.1%} [no limit]"
    return f"{share.mean:+.1%} [{share.low:+.1%}, {share.high:+.1%}]"


def interval(estimate: Estimate) -> str:
    """Mean and interval with two digits."""
    limits = f" [{estimate.low:.2f}, {estimate.high:.2f}]" if estimate.known else ""
    return f"{estimate.mean:.2f}{limits}"


def as_json(estimate: Estimate | None) -> dict[str, Any] | None:
    """An estimate as JSON, infinite limits as null."""
    if estimate is None:
        return None
    low, high = ((limit if np.isfinite(limit) else None) for limit in (estimate.low, estimate.high))
    return {"mean": estimate.mean, "low": low, "high": high, "seeds": estimate.seeds}
