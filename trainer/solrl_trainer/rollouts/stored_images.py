"""Stored images in the place of explored candidates."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from solrl_core.families.pipeline import PipelineBackbone
from solrl_core.rewards.images import as_floats
from solrl_proto.rollouts import PromptItem

from solrl_trainer.prompts.image_reader import read_image
from solrl_trainer.rollouts.groups import CandidateGroup, ScoredSamples, batched


class StoredImages:
    """Groups of stored images, encoded by the model's autoencoder: the chosen one scores 1, a rejected one 0."""

    def __init__(
        self, files: Mapping[str, Sequence[Path]], backbone: PipelineBackbone, rewards: Sequence[str], batch: int
    ) -> None:
        """`files`: as of `stored_files`. `rewards`: of the run, none of which is computed. `batch`: read at once."""
        if backbone.frames > 1:
            raise ValueError(
                f"got clips of {backbone.frames} frames to train on stored images; expected generate.frames=1, which "
                f"makes images of {backbone.name}"
            )
        self._files, self._backbone, self._rewards, self._batch = files, backbone, rewards, batch

    def groups(self, prompts: Sequence[PromptItem]) -> Iterator[CandidateGroup]:
        """The groups of these prompts.

        Raises:
            ValueError: as `read_image`.
        """
        for part in batched(prompts, max(1, self._batch // len(self._files[prompts[0].id]))):
            paths = [path for prompt in part for path in self._files[prompt.id]]
            images = torch.stack([self._read(path) for path in paths])
            count = len(paths) // len(part)
            scores = torch.tensor([1.0, 0.0][:count]).repeat(len(part))
            rewards = {name: torch.full((len(paths),), torch.nan) for name in self._rewards}
            # One by one: in float32, a batch of large images takes gigabytes.
            device = self._backbone.device
            latents = torch.cat([self._backbone.encode_images(image.to(device)) for image in images[:, None]])
            samples = ScoredSamples(latents, images, None, scores, rewards).split(len(part))
            for prompt, stored in zip(part, samples, strict=True):
                yield CandidateGroup(prompt, range(count), stored.scores.tolist(), stored)

    def _read(self, path: Path) -> torch.Tensor:
        """An image float32 [3, H, W] in [0, 1], scaled and cropped at its centre to the model's size."""
        fitted = ImageOps.fit(read_image(path), (self._backbone.width, self._backbone.height), Image.Resampling.LANCZOS)
        return as_floats(torch.from_numpy(np.array(fitted)).permute(2, 0, 1))
