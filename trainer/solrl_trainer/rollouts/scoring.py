"""Rewards of samples, and the score that training optimises."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from solrl_core.rewards import RewardSet
from solrl_core.rewards.base import OnScored, weighted_sum
from solrl_proto.rollouts import RewardSpec, RewardTime

from solrl_trainer.rollouts.batch_limit import BatchLimit
from solrl_trainer.rollouts.groups import GroupSamples, Prompts, ScoredSamples, one_each
from solrl_trainer.rollouts.overlap import Pending, SideStream

OnTimes = Callable[[Mapping[str, RewardTime]], None]
"""Called with the time of a reward."""


class Scorer:
    """Scores samples, on a GPU while others are generated.

    Attributes:
        limit: largest number of images that are scored at once.
    """

    def __init__(
        self,
        rewards: RewardSet,
        names: Sequence[str],
        trained: Sequence[RewardSpec],
        side: SideStream,
        limit: BatchLimit | None = None,
        on_times: OnTimes = lambda times: None,
    ) -> None:
        """Set up a scorer.

        Args:
            rewards: loaded rewards.
            names: rewards to apply.
            trained: rewards that make up the score, with their weights.
            side: stream to score on.
            limit: largest number of images that are scored at once; scorers of the same rewards share it.
            on_times: called with the time of each reward, whenever it has scored images.
        """
        self.limit = limit or BatchLimit(doing="scoring")
        self._rewards = rewards
        self._names = tuple(names)
        self._weights = {spec.name: spec.weight for spec in trained}
        self._side = side
        self._on_times = on_times

    @property
    def overlaps(self) -> bool:
        """Whether samples are scored while others are generated."""
        return self._side.overlaps

    def score(self, prompt: Prompts, samples: GroupSamples | Pending[ScoredSamples]) -> Pending[ScoredSamples]:
        """Begin to apply every reward to samples. Samples with scores are returned unchanged."""
        if not isinstance(samples, GroupSamples):
            return samples
        if isinstance(samples, ScoredSamples):
            return lambda: samples

        def scored() -> ScoredSamples:
            score, rewards = self._rate(prompt, samples.images)
            return ScoredSamples(samples.latents, samples.images.cpu(), samples.recording, score, rewards)

        return self._side.start(scored)

    def scores(self, prompt: Prompts, images: torch.Tensor) -> Pending[torch.Tensor]:
        """Begin to compute the scores [N] of images [N, 3, H, W]."""
        return self._side.start(lambda: self._rate(prompt, images)[0])

    def _rate(self, prompt: Prompts, images: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        prompts = one_each(prompt, len(images))
        rewards = score_within(
            self.limit,
            self._rewards,
            self._names,
            images,
            [one.text for one in prompts],
            [one.metadata for one in prompts],
            self._scored,
        )
        return weighted_sum(rewards, self._weights), rewards

    def _scored(self, name: str, seconds: float) -> None:
        self._on_times({name: RewardTime(seconds=seconds, server=self._rewards.server(name))})


def score_within(
    limit: BatchLimit,
    rewards: RewardSet,
    names: Sequence[str],
    images: torch.Tensor,
    texts: Sequence[str],
    metadata: Sequence[Mapping[str, Any]],
    on_scored: OnScored = lambda name, seconds: None,
) -> dict[str, torch.Tensor]:
    """Scores of images as by `RewardSet.score`, in batches that fit into memory.

    Raises:
        FloatingPointError: an image is not finite. Rewards that round images to bytes would give it a score.
    """
    if not torch.isfinite(images).all():
        raise FloatingPointError(
            "the policy generates images that are not finite, so the run stops before they are scored. Lower "
            "optimizer.learning_rate; `--resume` continues from the last checkpoint"
        )

    def score(size: int) -> dict[str, torch.Tensor]:
        batches = [slice(start, start + size) for start in range(0, len(images), size)]
        parts = [rewards.score(names, images[rows], texts[rows], metadata[rows], on_scored) for rows in batches]
        return {name: torch.cat([part[name] for part in parts]) for name in names}

    return limit.run(len(images), score)
