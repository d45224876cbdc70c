"""Exploration: cheap candidates of an iteration's prompts, whose seeds and scores decide what is trained on."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from solrl_proto.noise import expand_seeds
from solrl_proto.rollouts import PromptItem

from solrl_trainer.rollouts.groups import CandidateGroup

PromptsOf = Callable[[int], Sequence[PromptItem]]
"""This rank's prompts of an iteration."""


@dataclass(frozen=True)
class ExplorationSummary:
    """Outcome of an exploration.

    Attributes:
        version: behaviour policy that the candidates were made under.
        precision, numerics: arithmetic that they were made in.
        score_sum, score_count: over all candidates that have a score.
        seconds: time it took, whether or not the trainer waited for it.
    """

    version: int
    precision: str
    numerics: str
    score_sum: float
    score_count: int
    seconds: float


class Exploration(Protocol):
    """One iteration's candidates: an iterator of groups, in any order, and then a summary."""

    def __iter__(self) -> Iterator[CandidateGroup]:
        """Yield each group as soon as it is complete."""

    @property
    def summary(self) -> ExplorationSummary:
        """Available after the last group."""


class Explorer(Protocol):
    """A source of candidates."""

    def look_ahead(self, version: int) -> None:
        """Begin what can be explored now that `version` is the behaviour policy."""

    def explore(self, iteration: int) -> Exploration:
        """The candidates of an iteration."""


def seed_root(seed: int, iteration: int) -> int:
    """The root of all candidates' seeds of an iteration; −1 for the measurement of rank fidelity."""
    return expand_seeds(seed, f"explore/{iteration}", 1)[0]
