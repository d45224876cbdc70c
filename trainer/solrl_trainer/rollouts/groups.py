"""A prompt's group on its way from exploration to training."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

import torch
from solrl_proto.rollouts import PromptItem


@dataclass(frozen=True)
class GroupSamples:
    """Full-length samples of one prompt's seeds, in the order of the seeds.

    Attributes:
        latents: clean latents x0, float32 [n, ...].
        images: float32 [n, 3, H, W] in [0, 1].
    """

    latents: torch.Tensor
    images: torch.Tensor


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
        rewards = {name: values[index] for name, values in self.rewards.items()}
        tensors = {field.name: getattr(self, field.name)[index] for field in fields(self) if field.name != "rewards"}
        return type(self)(**tensors, rewards=rewards)


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
