"""Base class of rewards that score batches of (image, prompt) pairs on a device."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from solrl_core.rewards.loading import batches


class BatchedReward(ABC):
    """Scores batches of at most `batch_size` images.

    Raises:
        ValueError: the batch size is below one.
    """

    def __init__(self, device: str, batch_size: int) -> None:
        batches(0, batch_size)
        self._device = torch.device(device)
        self._batch_size = batch_size

    @torch.inference_mode()
    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, object]]) -> Tensor:
        """Score images [N, 3, H, W] in [0, 1] with N prompts; float32 [N].

        Raises:
            ValueError: the numbers of images and prompts differ, or the reward refuses a prompt.
        """
        if len(images) != len(prompts):
            raise ValueError(f"got {len(images)} images and {len(prompts)} prompts; expected one prompt per image")
        scores = [self._scores(images[rows], prompts[rows]) for rows in batches(len(images), self._batch_size)]
        return torch.cat(scores) if scores else torch.zeros(0, device=self._device)

    @abstractmethod
    def _scores(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Scores [N] of one batch."""
