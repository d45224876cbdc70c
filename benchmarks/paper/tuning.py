"""The learning rate of each algorithm: the same grid and the same compute for all, judged on training prompts alone."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from paper.compute import costs_of, iterations_within, passes_of_iteration
from paper.experiments import Experiment, Programme
from paper.finished import Finished, Runs

GRID = (1e-4, 3e-4, 1e-3, 3e-3)
SEED = 0
"""No table has a run of this seed."""
SHARE = 0.5
"""Compute of a trial, as a share of a run's."""
LAST = 0.25
"""Share of the iterations, the last ones, over which a trial is judged."""
Changes = Mapping[str, Any]
"""Settings of a recipe by dotted key."""
AS_IS: Changes = MappingProxyType({})


@dataclass(frozen=True)
class Choice:
    """An algorithm's learning rate.

    Attributes:
        rate: the learning rate with the highest score.
        scores: learning rate → mean training reward of all candidates of the last iterations; −inf if it stopped.
    """

    rate: float
    scores: Mapping[float, float]

    @property
    def at_edge(self) -> bool:
        """Whether a rate beyond the grid might be better."""
        return self.rate in (min(self.scores), max(self.scores))


def budget(programme: Programme, results: Path) -> float:
    """Compute of a run, in seconds at the programme's shape: that of Sol-RL at its number of iterations."""
    config = programme.experiment("sol_rl", programme.seeds[0]).config
    return config.iterations * costs_of(programme.shape, results).seconds(passes_of_iteration(config))


def affordable(programme: Programme, recipe: str, results: Path, share: float = 1.0, changes: Changes = AS_IS) -> int:
    """Iterations of a recipe with changes within `share` of the budget."""
    config = programme.experiment(recipe, programme.seeds[0], changes).config
    return iterations_within(config, share * budget(programme, results), costs_of(programme.shape, results))


def trials(programme: Programme, recipe: str, results: Path, changes: Changes = AS_IS) -> dict[float, Experiment]:
    """The trials of a recipe with changes, by learning rate."""
    count = affordable(programme, recipe, results, SHARE, changes)
    unjudged = {**changes, "iterations": count, "evaluate.every": 0, "evaluate.fidelity_prompts": 0}
    return {rate: programme.experiment(recipe, SEED, {**unjudged, "optimizer.learning_rate": rate}) for rate in GRID}


def choose(programme: Programme, recipe: str, runs: Runs, results: Path, changes: Changes = AS_IS) -> Choice | None:
    """The learning rate of a recipe with changes; None while a trial is missing."""
    tried = trials(programme, recipe, results, changes)
    if any(one.name not in runs for one in tried.values()):
        return None
    scores = {rate: training_reward(runs[one.name]) for rate, one in tried.items()}
    return Choice(max(scores, key=lambda rate: scores[rate]), scores)


def training_reward(run: Finished) -> float:
    """Mean reward of all candidates of training prompts in the last iterations; −inf if the run stopped."""
    if run.stopped is not None or not run.iterations:
        return -math.inf
    last = run.iterations[-max(1, round(LAST * len(run.iterations))) :]
    return sum(line["proxy_mean"] for line in last) / len(last)
