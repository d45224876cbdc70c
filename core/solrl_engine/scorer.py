"""Scoring of generated images with loaded rewards, in batches that fit into memory."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from solrl_core.rewards import RewardSet
from solrl_core.rewards.images import as_floats
from solrl_proto.rollouts import PromptItem, RewardTime
from torch import Tensor

from solrl_engine.batch_size import AdaptiveBatchSize


class NonFiniteImagesError(FloatingPointError):
    """A model generates images that are not finite; `prompt` is the first one's."""

    def __init__(self, prompt: PromptItem) -> None:
        super().__init__(f"the images of prompt {prompt.id!r} are not finite")
        self.prompt = prompt


Scores = dict[str, Tensor]
"""Reward → float32 [N], on the CPU."""
RewardTimes = dict[str, RewardTime]
"""Reward → its time."""


class Scorer:
    """Scores images with loaded rewards; `batch` is the largest number of images that are scored at once."""

    def __init__(self, rewards: RewardSet, batch: AdaptiveBatchSize | None = None) -> None:
        self.rewards = rewards
        self.batch = batch or AdaptiveBatchSize(doing="scoring")

    def score(self, names: Sequence[str], images: Tensor, prompts: Sequence[PromptItem]) -> tuple[Scores, RewardTimes]:
        """Score images with the named rewards; also returns the time of each.

        Images are float32 [N, 3, H, W] in [0, 1], or uint8 [N, H, W, 3]; clips have another axis after the first.

        Raises:
            NonFiniteImagesError: an image is not finite. Rewards that round images to bytes would give it a score.
            RewardError: a reward failed, or its scores cannot be used.
            DoesNotFitError: not even one image fits.
        """

        def score(rows: slice) -> tuple[Scores, RewardTimes]:
            part = float_images(images[rows])
            finite = torch.isfinite(part).flatten(1).all(1)
            if not finite.all():
                raise NonFiniteImagesError(prompts[rows][int((~finite).nonzero()[0])])
            seconds: dict[str, float] = {}
            texts, metadata = [prompt.text for prompt in prompts[rows]], [prompt.metadata for prompt in prompts[rows]]
            scores = self.rewards.score(names, part, texts, metadata, seconds.__setitem__)
            return scores, times_of(self.rewards, seconds)

        parts = self.batch.run(len(images), score)
        joined = {name: torch.cat([scores[name] for scores, _ in parts]) for name in names}
        return joined, sum_times(times for _, times in parts)


def times_of(rewards: RewardSet, seconds: Mapping[str, float]) -> RewardTimes:
    """The seconds of each reward, with its server."""
    return {name: RewardTime(seconds=spent, server=rewards.server(name)) for name, spent in seconds.items()}


def sum_times(parts: Iterable[Mapping[str, RewardTime]]) -> RewardTimes:
    """The time of each reward in all parts."""
    total: RewardTimes = {}
    for name, reward_time in (item for part in parts for item in part.items()):
        before = total[name].seconds if name in total else 0.0
        total[name] = RewardTime(seconds=before + reward_time.seconds, server=reward_time.server)
    return total


def float_images(images: Tensor) -> Tensor:
    """Images as float32 [..., 3, H, W] in [0, 1], also from uint8 [..., H, W, 3]."""
    return as_floats(images.movedim(-1, -3)) if images.dtype == torch.uint8 else images
