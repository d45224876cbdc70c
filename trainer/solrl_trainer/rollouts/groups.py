"""A prompt's group on its way from exploration to training."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from solrl_core.sampler import Recording
from solrl_proto.rollouts import PromptItem


@dataclass(frozen=True)
class GroupSamples:
    """Full-length samples of one prompt's seeds, in the order of the seeds.

    Attributes:
        latents: clean latents x0, float32 [n, ...].
        images: float32 [n, 3, H, W] in [0, 1].
        recording: every step, where the algorithm trains on trajectories.
    """

    latents: torch.Tensor
    images: torch.Tensor
    recording: Recording | None


@dataclass(frozen=True)
class ScoredSamples(GroupSamples):
    """Samples with their rewards; their images are on the CPU.

    Attributes:
        scores: weighted sum of the trained rewards [n].
        rewards: each reward by name, trained or only logged [n].
    """

    scores: torch.Tensor
    rewards: dict[str, torch.Tensor]

    def rows(self, index: Sequence[int]) -> Self:
        """Some of the samples."""
        recording = self.recording
        return type(self)(
            self.latents[index],
            self.images[index],
            None if recording is None else recording_rows(recording, index),
            self.scores[index],
            {name: values[index] for name, values in self.rewards.items()},
        )


@dataclass(frozen=True)
class CandidateGroup:
    """A prompt's explored candidates.

    Attributes:
        prompt: what they show.
        seeds: one per candidate.
        scores: score of each; None for a pruned candidate.
        samples: the candidates themselves, where they were made here at full length to be trained on.
    """

    prompt: PromptItem
    seeds: Sequence[int]
    scores: Sequence[float | None]
    samples: ScoredSamples | None = None


@dataclass(frozen=True)
class GroupSelection:
    """The kept candidates of a group, the best half first.

    Attributes:
        prompt: what they show.
        seeds: of the kept candidates.
        proxy: the scores that they were selected by [kept].
        samples: the kept candidates themselves, where they are trained on as they are.
    """

    prompt: PromptItem
    seeds: list[int]
    proxy: torch.Tensor
    samples: ScoredSamples | None = None


@dataclass(frozen=True)
class ScoredGroup:
    """A selection with the samples that are trained on."""

    selection: GroupSelection
    samples: ScoredSamples


def recording_rows(recording: Recording, index: Sequence[int]) -> Recording:
    """The recording of some of its candidates."""
    log_probs = recording.log_probs
    return replace(
        recording,
        states=recording.states[:, index],
        log_probs=None if log_probs is None else log_probs[:, index],
    )
