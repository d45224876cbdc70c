"""Rewards of samples, and the score that training optimises."""

from collections.abc import Sequence

import torch
from solrl_core.rewards import RewardSet
from solrl_core.rewards.base import weighted_sum
from solrl_proto.rollouts import PromptItem, RewardSpec

from solrl_trainer.rollouts.groups import GroupSamples, ScoredSamples


class Scorer:
    """Scores a prompt's samples."""

    def __init__(self, rewards: RewardSet, names: Sequence[str], trained: Sequence[RewardSpec]) -> None:
        """Set up a scorer.

        Args:
            rewards: loaded rewards.
            names: rewards to apply.
            trained: rewards that make up the score, with their weights.
        """
        self._rewards = rewards
        self._names = tuple(names)
        self._weights = {spec.name: spec.weight for spec in trained}

    def score(self, prompt: PromptItem, samples: GroupSamples) -> ScoredSamples:
        """Apply every reward to a prompt's samples. Samples with scores are returned unchanged."""
        if isinstance(samples, ScoredSamples):
            return samples
        score, rewards = self.rate(prompt, samples.images)
        return ScoredSamples(samples.latents, samples.images.cpu(), samples.recording, score, rewards)

    def rate(self, prompt: PromptItem, images: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Scores [N] of images [N, 3, H, W] of a prompt, and each reward by name [N]."""
        count = len(images)
        rewards = self._rewards.score(self._names, images, [prompt.text] * count, [prompt.metadata] * count)
        return weighted_sum(rewards, self._weights), rewards
