"""The learning rate of each algorithm: the same grid and the same compute for all, judged on training prompts alone."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from paper.compute import seconds_of
from paper.experiments import Changes, Experiment, Programme
from paper.finished import Finished, Runs

GRID = (1e-4, 3e-4, 1e-3, 3e-3)
SEED = 0
"""No table has a run of this seed."""
SHARE = 0.5
"""Compute of a trial, as a share of a run's."""
LAST = 0.25
"""Share of the iterations, the last ones, over which a trial is judged."""


@dataclass(frozen=True, eq=False)
class Tuning:
    """What the trials of a learning rate train: a recipe with changes."""

    recipe: str
    changes: Changes = field(default_factory=dict)


USUAL = Tuning("diffusionnft")
"""Trials for all tables whose arms must have one rate, so that one axis varies: their baseline."""


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


def affordable(programme: Programme, tuning: Tuning, share: float = 1.0) -> int:
    """Whole iterations, at least one, within this share of the compute of a run of Sol-RL."""
    sol_rl, own = (programme.experiment(one.recipe, SEED, one.changes).config for one in (Tuning("sol_rl"), tuning))
    return max(1, round(share * sol_rl.iterations * seconds_of(sol_rl) / seconds_of(own)))


def trials(programme: Programme, tuning: Tuning) -> dict[float, Experiment]:
    """The trials by learning rate."""
    unjudged = {
        **tuning.changes,
        "iterations": affordable(programme, tuning, SHARE),
        "evaluate.every": 0,
        "evaluate.fidelity_prompts": 0,
    }
    return {
        rate: programme.experiment(tuning.recipe, SEED, {**unjudged, "optimizer.learning_rate": rate}) for rate in GRID
    }


def choose(programme: Programme, tuning: Tuning, runs: Runs) -> Choice | None:
    """The learning rate; None while a trial is missing."""
    tried = trials(programme, tuning)
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
