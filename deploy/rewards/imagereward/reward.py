"""ImageReward by its authors' package, `image-reward`, for a reward service in an environment with that package.

solrl-reward serve --rewards imagereward=reward:PublishedImageReward
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import ImageReward as published  # noqa: N813
import torch
from ImageReward.models.BLIP import blip
from solrl_core.fingerprint import combined_digest, module_digest
from solrl_core.rewards.imagereward import CHECKPOINT, DEFAULT_TOKENIZER, MED_CONFIG, REPOSITORY, ImageReward
from solrl_core.rewards.images import as_pil
from solrl_core.rewards.loading import listed, published_or, read_checkpoint
from transformers import BertTokenizer


class PublishedImageReward:
    """Scores each (image, prompt) pair with the package's `score`, one at a time.

    Args:
        checkpoint: file in ImageReward's format. The default downloads it from the hub.
        med_config: BLIP's text settings; by default those of the hub.
        processor: folder or hub id of the BERT tokenizer.
        device: device of the model.

    Attributes:
        digest: digest of the package's version, the weights and the tokenizer.

    Raises:
        OSError: files are missing.
        ValueError: the checkpoint lacks weights.
    """

    parameters = ImageReward.parameters
    """Parameters of the published model, for memory plans."""

    def __init__(
        self,
        checkpoint: str | None = None,
        med_config: str | None = None,
        processor: str = DEFAULT_TOKENIZER,
        *,
        device: str = "cpu",
    ) -> None:
        checkpoint = published_or(checkpoint, REPOSITORY, CHECKPOINT).fetched()
        med_config = published_or(med_config, REPOSITORY, MED_CONFIG, "med_config").fetched()
        weights = read_checkpoint(checkpoint)
        with bert_tokenizer_of(processor):
            self._model = published.load(checkpoint, device=device, med_config=med_config)
        # The package loads a checkpoint that lacks weights without an error.
        if missing := {name for name, _ in self._model.named_parameters()} - weights.keys():
            raise ValueError(f"{checkpoint!r} lacks weights of ImageReward: {listed(missing)}")
        vocabulary = json.dumps(self._model.blip.tokenizer.get_vocab(), sort_keys=True)
        package = f"image-reward {version('image-reward')}"
        self.digest = combined_digest(package, module_digest(self._model), vocabulary)

    @torch.inference_mode()
    def __call__(
        self, images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> torch.Tensor:
        """Score images [N, 3, H, W] in [0, 1] with N prompts; float32 [N].

        Raises:
            ValueError: the numbers of images and prompts differ.
        """
        pairs = zip(prompts, as_pil(images), strict=True)
        return torch.tensor([self._model.score(prompt, image) for prompt, image in pairs], dtype=torch.float32)


@contextmanager
def bert_tokenizer_of(where: str) -> Iterator[None]:
    """Let the package read its tokenizer, which it loads by a fixed hub id, from a folder or another hub id."""
    tokenizer = SimpleNamespace(from_pretrained=lambda _: BertTokenizer.from_pretrained(where))
    with patch.object(blip, "BertTokenizer", tokenizer):
        yield
