"""Groups: the candidates of a prompt, in the stages from exploration to training."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Self, TypeVar

import torch
from solrl_core.sampling.sampler import Recording
from solrl_proto.rollouts import PromptItem

Item = TypeVar("Item")


def flattened(prompts: Sequence[PromptItem], seeds: Sequence[Sequence[int]]) -> tuple[list[PromptItem], list[int]]:
    """Lists of all candidates' prompts and seeds, group after group."""
    rows = [(prompt, seed) for prompt, group_seeds in zip(prompts, seeds, strict=True) for seed in group_seeds]
    return [prompt for prompt, _ in rows], [seed for _, seed in rows]


def best_and_worst(rows: torch.Tensor, count: int) -> torch.Tensor:
    """The first and the last `count` rows."""
    return rows if len(rows) <= 2 * count else torch.cat([rows[:count], rows[-count:]])


def batched(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """The items in lists of at most `size`, each as soon as it is complete."""
    items = iter(items)
    while part := list(islice(items, size)):
        yield part


@dataclass(frozen=True)
class ScoredSamples:
    """Full-length samples of seeds with their rewards, in the seeds' order: of one group, or of several made together.

    Attributes:
        latents: clean latents x0, float32 [n, ...].
        images: `for_showing`, float32 in [0, 1], on the CPU; of the best and worst alone, or of none if nobody will
            see them.
        recording: every step, if the algorithm trains on trajectories.
        scores: weighted sum of the trained rewards [n].
        rewards: each reward by name, trained or only logged [n]; NaN where it is none of the prompt's.
    """

    latents: torch.Tensor
    images: torch.Tensor
    recording: Recording | None
    scores: torch.Tensor
    rewards: dict[str, torch.Tensor]

    @classmethod
    def join(cls, parts: Sequence[Self]) -> Self:
        """The samples of all parts, in their order."""
        if len(parts) == 1:
            return parts[0]
        recordings = [part.recording for part in parts if part.recording is not None]
        return cls(
            torch.cat([part.latents for part in parts]),
            torch.cat([part.images for part in parts]),
            Recording.join(recordings) if recordings else None,
            torch.cat([part.scores for part in parts]),
            {name: torch.cat([part.rewards[name] for part in parts]) for name in parts[0].rewards},
        )

    def split(self, groups: int) -> list[Self]:
        """The samples of each of `groups` groups of equal size."""
        if groups == 1:
            return [self]
        size = len(self.scores) // groups
        return [self.rows(range(start, start + size)) for start in range(0, len(self.scores), size)]

    def rows(self, index: Sequence[int]) -> Self:
        recording, index = self.recording, list(index)
        return type(self)(
            self.latents[index],
            self.images[index] if len(self.images) else self.images,
            None if recording is None else recording.rows(index),
            self.scores[index],
            {name: values[index] for name, values in self.rewards.items()},
        )


@dataclass(frozen=True)
class CandidateGroup:
    """Candidates of a prompt: all explored candidates, or the selected candidates, the best half first.

    `samples` are latents [N, ...] with rewards, to train on: the candidates themselves if they were generated for that,
    otherwise regenerated ones, None until then.
    """

    prompt: PromptItem
    seeds: Sequence[int]
    scores: Sequence[float]
    samples: ScoredSamples | None = None

    @property
    def trained(self) -> ScoredSamples:
        """Its samples, which have been made."""
        assert self.samples is not None
        return self.samples

    def rows(self, index: Sequence[int]) -> Self:
        samples = None if self.samples is None else self.samples.rows(index)
        seeds, scores = [self.seeds[i] for i in index], [self.scores[i] for i in index]
        return replace(self, seeds=seeds, scores=scores, samples=samples)
