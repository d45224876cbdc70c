"""Exploration: cheap candidates of an iteration's prompts, whose scores decide which seeds are trained on."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from solrl_proto.noise import expand_seeds
from solrl_proto.rollouts import PromptItem, RewardTime

from solrl_trainer.rollouts.groups import CandidateGroup

PromptsOf = Callable[[int], Sequence[PromptItem]]
"""This rank's prompts of an iteration."""


@dataclass(frozen=True)
class ExplorationSummary:
    """Outcome of an exploration.

    Attributes:
        iteration: iteration that the candidates are for.
        version: version of the behaviour policy.
        precision, numerics: arithmetic of the generation.
        score_sum, score_count: sum and number of scores, over all candidates that have one.
        seconds: duration, whether or not the trainer waited for it.
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


@dataclass(frozen=True)
class ExploredImages:
    """Images of explored candidates.

    Attributes:
        images: float32 [N, 3, H, W] in [0, 1].
        seconds: time that the exploring device spent on them.
    """

    images: torch.Tensor
    seconds: float


class Exploration(Protocol):
    """Candidates of one iteration: an iterator of groups, in any order, followed by a summary."""

    def __iter__(self) -> Iterator[CandidateGroup]:
        """Yield each group as soon as it is complete."""

    @property
    def summary(self) -> ExplorationSummary:
        """Available after the last group."""


class ImageSource(Protocol):
    """A source of images of explored candidates."""

    def images_of(
        self, prompts: Sequence[PromptItem], seeds: Sequence[Sequence[int]], version: int, iteration: int
    ) -> ExploredImages:
        """Images of candidates explored for an iteration under `version`, in the order of the prompts.

        Raises:
            ProblemError: a service refuses, has lost the version, or cannot be reached.
        """


class Explorer(ImageSource, Protocol):
    """A source of candidates."""

    def prefetch(self, version: int, *, beyond: bool = True) -> None:
        """Begin all explorations that are possible now that `version` is the behaviour policy.

        Without `beyond`, only that of its own iteration.
        """

    def explore(self, iteration: int) -> Exploration:
        """The candidates of an iteration."""

    def unpruned_groups(
        self, prompts: Sequence[PromptItem], version: int, root: int, iteration: int
    ) -> list[CandidateGroup]:
        """Explore the groups of these prompts under `version` as for an iteration, but without pruning.

        `root` is the root of their seeds.
        """


def seed_root(seed: int, iteration: int) -> int:
    """Root of all candidates' seeds of an iteration; iteration −1 is the measurement of rank fidelity."""
    return expand_seeds(seed, f"explore/{iteration}", 1)[0]
