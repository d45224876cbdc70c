"""Exploration: cheap candidates of an iteration's prompts, whose scores decide which seeds are trained on."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from solrl_proto.noise import expand_seeds
from solrl_proto.rollouts import RewardTime
from solrl_proto.selection import rounding

from solrl_trainer.rollouts.groups import CandidateGroup


@dataclass(frozen=True)
class ExplorationSummary:
    """Outcome of an exploration.

    Attributes:
        iteration: iteration that the candidates are for.
        version: version of the behaviour policy.
        precision, numerics: arithmetic of the generation.
        score_sum, score_count: sum and number of scores, over all candidates that have one.
        seconds: duration, whether or not the trainer waited for it; of a service's part, if it explores a share.
        seconds_here: time in which this device explored its share, under the version of this iteration; None if it has
            none beside a service.
        times: time of each reward, by name, as a service measured it; empty for local exploration.
    """

    iteration: int
    version: int
    precision: str
    numerics: str
    score_sum: float
    score_count: int
    seconds: float
    times: Mapping[str, RewardTime] = field(default_factory=dict)
    seconds_here: float | None = None

    def with_groups(self, groups: Sequence[CandidateGroup], seconds: float) -> Self:
        """With these groups, which this device explored, and the time in which it explored in this iteration."""
        scores = [score for group in groups for score in scored(group.scores)]
        return replace(
            self,
            score_sum=self.score_sum + sum(scores),
            score_count=self.score_count + len(scores),
            seconds_here=seconds,
        )


class Exploration:
    """Candidates of one iteration: an iterator of groups, in any order, each as soon as it is complete.

    Attributes:
        summary: available after the last group.
    """

    summary: ExplorationSummary

    def __init__(
        self, arriving: Iterator[CandidateGroup | ExplorationSummary], has_arrived: Callable[[], bool] = lambda: True
    ) -> None:
        """`arriving`: the groups, and at last the summary. `has_arrived`: whether the next would not be waited for."""
        self._arriving = arriving
        self._has_arrived = has_arrived

    @property
    def ready(self) -> bool:
        """Whether there is a further group, or the summary, for which nobody has to wait."""
        return not hasattr(self, "summary") and self._has_arrived()

    def __iter__(self) -> Iterator[CandidateGroup]:
        """Yield each group; raise an error of the exploration."""
        for arrived in self._arriving:
            if isinstance(arrived, ExplorationSummary):
                self.summary = arrived
                return
            yield arrived


def scored(scores: Sequence[float]) -> list[float]:
    """The scores of candidates that were not pruned."""
    return [score for score in scores if not math.isnan(score)]


def has_spread(scores: Sequence[float]) -> bool:
    """Whether some scores differ by more than rounding."""
    made = scored(scores)
    return max(made) - min(made) > rounding(made)


def seed_root(seed: int, iteration: int) -> int:
    """Root of all candidates' seeds of an iteration; iteration −1 is the measurement of rank fidelity."""
    return expand_seeds(seed, f"explore/{iteration}", 1)[0]
