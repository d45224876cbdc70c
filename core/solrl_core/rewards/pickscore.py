"""PickScore: exp(logit_scale) · cosine / 26. Source: Kirstain et al. 2023 (arXiv 2305.01569) and its reward servers."""

from collections.abc import Mapping
from typing import Any

import torch

from solrl_core.rewards.clip import ClipReward
from solrl_core.rewards.images import as_pil
from solrl_core.rewards.loading import (
    CONFIG,
    TOKENIZER,
    RewardFile,
    dtype_named,
    image_processor_at,
    pretrained,
    processor_of,
    tokenizer_at,
)

DEFAULT_MODEL = "yuvalkirstain/PickScore_v1"
DEFAULT_PROCESSOR = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
DIVISOR = 26


class PickScore(ClipReward):
    """Scores with a CLIP tuned on human preferences; 8-bit images go through transformers' image processor.

    Args:
        model: folder or hub id of a transformers CLIP.
        processor: folder or hub id of tokenizer and image processor; by default `model` if that is a folder, else
            the published one.
        device, dtype, batch_size: device, dtype of the weights, and images per batch.

    Raises:
        OSError: files are missing.
        ValueError: the model, the tokenizer or an option is invalid.
    """

    parameters = 986_109_775
    """Parameters of the published model, for memory plans."""

    @staticmethod
    def sources(options: Mapping[str, Any]) -> tuple[RewardFile, ...]:
        """Sources of everything that these options load; `doctor` looks for them."""
        model = options.get("model", DEFAULT_MODEL)
        processor = processor_of(model, options.get("processor"), DEFAULT_PROCESSOR)
        return RewardFile(model, CONFIG), RewardFile(processor, TOKENIZER, "processor")

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        processor: str | None = None,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        batch_size: int = 32,
    ) -> None:
        from transformers import CLIPModel

        clip = pretrained(CLIPModel, model, dtype_named(dtype))
        processor = processor_of(model, processor, DEFAULT_PROCESSOR)
        self._processor = image_processor_at(processor)
        super().__init__(
            clip,
            tokenizer_at(processor),
            self._processor.to_json_string(),
            device=device,
            batch_size=batch_size,
        )

    def _pixels(self, images: torch.Tensor) -> torch.Tensor:
        pixels: torch.Tensor = self._processor(images=as_pil(images), return_tensors="pt").pixel_values
        return pixels

    def _score(self, cosines: torch.Tensor) -> torch.Tensor:
        return cosines * self._logit_scale / DIVISOR
