"""CLIPScore: logits_per_image / 100 of a CLIP model. Source: the FlowGRPO and DiffusionNFT reward servers."""

from collections.abc import Mapping
from typing import Any

import torch

from solrl_core.rewards.clip import ClipReward
from solrl_core.rewards.images import Normalize, short_side_then_centre
from solrl_core.rewards.loading import (
    CONFIG,
    TOKENIZER,
    RewardFile,
    dtype_named,
    image_processor_at,
    pretrained,
    tokenizer_at,
)

DEFAULT_MODEL = "openai/clip-vit-large-patch14"


class ClipScore(ClipReward):
    """Scores with any transformers CLIP.

    Args:
        model: folder or hub id.
        processor: folder or hub id of tokenizer and image normalisation; by default that of the model.
        device, dtype, batch_size: device, dtype of the weights, and images per batch.

    Raises:
        OSError: files are missing.
        ValueError: the model, the tokenizer or an option is invalid.
    """

    parameters = 427_616_847
    """Parameters of the published model, for memory plans."""

    @staticmethod
    def sources(options: Mapping[str, Any]) -> tuple[RewardFile, ...]:
        """Sources of everything that these options load; `doctor` looks for them."""
        model = options.get("model", DEFAULT_MODEL)
        return RewardFile(model, CONFIG), RewardFile(options.get("processor") or model, TOKENIZER, "processor")

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
        images = image_processor_at(processor or model)
        self._normalize = Normalize(images.image_mean, images.image_std)
        super().__init__(
            clip,
            tokenizer_at(processor or model),
            f"{images.image_mean} {images.image_std}",
            device=device,
            batch_size=batch_size,
        )

    def _pixels(self, images: torch.Tensor) -> torch.Tensor:
        return self._normalize(short_side_then_centre(images, self._side))

    def _score(self, cosines: torch.Tensor) -> torch.Tensor:
        return cosines * self._logit_scale / 100
