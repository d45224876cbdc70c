"""Source: where a run's groups come from."""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import torch
from solrl_engine.side_stream import Pending
from solrl_proto.rollouts import PromptItem

from solrl_trainer.rollouts.device_source import DeviceSource
from solrl_trainer.rollouts.exploration import Exploration
from solrl_trainer.rollouts.groups import CandidateGroup, ScoredSamples


class ImageSource(Protocol):
    """A source of images of explored candidates."""

    def images_of(
        self, prompts: Sequence[PromptItem], seeds: Sequence[Sequence[int]], version: int, iteration: int
    ) -> tuple[torch.Tensor, float]:
        """Images of candidates explored for an iteration under `version`, in the order of the prompts.

        Returns:
            Images `for_showing`, float32 in [0, 1], and the seconds that the exploring device spent on them.

        Raises:
            ProblemError: a service refuses, has lost the version, or cannot be reached.
        """


class Source(ImageSource, Protocol):
    """Explores and regenerates the groups of a run under the versions that it is given.

    Exploration is under the version of `explore.lag` iterations before, regeneration under the newest: the behaviour
    policy, in BF16 and with all steps.
    """

    @property
    def device(self) -> DeviceSource:
        """This device, which trains, evaluates, and regenerates unless a service does."""

    def start(self, adapters: Mapping[int, bytes], pushed: Collection[str]) -> None:
        """Start from these versions, the newest last, and begin to explore under them.

        Args:
            adapters: files by version.
            pushed: digests of all versions that this run has pushed so far.
        """

    def push(self, version: int, adapter: bytes) -> None:
        """Take the newest version of the behaviour policy, on all ranks, and begin to explore under it."""

    def explore(self, iteration: int) -> Exploration:
        """The candidates of this rank's prompts of an iteration."""

    def groups_per_batch(self, kept: int) -> int:
        """Number of selections of `kept` seeds to regenerate together."""

    def regenerate(self, selections: Sequence[CandidateGroup], iteration: int) -> Pending[ScoredSamples]:
        """Samples of the seeds of an iteration's selections, which are being scored, or made by a service."""

    def unpruned_groups(
        self, prompts: Sequence[PromptItem], version: int, root: int, iteration: int
    ) -> list[CandidateGroup]:
        """Explore the groups of these prompts under `version` as for an iteration, but without pruning.

        `root` is the root of their seeds.
        """
