"""HPSv2: the bare cosine. Source: Wu et al. 2023 (arXiv 2306.09341), the `hpsv2` package and its reward servers."""

import html
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from solrl_core.rewards.clip import ClipReward
from solrl_core.rewards.convert import open_clip_model
from solrl_core.rewards.images import Normalize, long_side_then_pad
from solrl_core.rewards.loading import (
    CONFIG,
    RewardFile,
    dtype_named,
    pretrained,
    published_or,
    require_one,
    tokenizer_at,
    tokenizer_file,
)

REPOSITORY, CHECKPOINT = "xswu/HPSv2", "HPS_v2.1_compressed.pt"
DEFAULT_PROCESSOR = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"


def clean_text(text: str) -> str:
    """Clean a text as open_clip does: fix its encoding, unescape HTML twice, collapse whitespace, lower-case."""
    import ftfy

    unescaped = html.unescape(html.unescape(ftfy.fix_text(text)))
    return re.sub(r"\s+", " ", unescaped).strip().lower()


class HpsV2(ClipReward):
    """Scores with HPS v2.1's CLIP. Text is cleaned as in open_clip; images are padded, not cropped.

    Args:
        model: folder or hub id of a transformers CLIP; excludes `checkpoint`.
        processor: folder or hub id of the CLIP tokenizer; by default `model` if that is a folder, else the published
            one.
        checkpoint: file in open_clip's format, as published by HPSv2. The default downloads it from the hub.
        vision_heads, text_heads: attention heads of a checkpoint, which its shapes do not reveal; by default
            ViT-H-14's.
        device, dtype, batch_size: device, dtype of the weights, and images per batch.

    Raises:
        OSError: files are missing.
        ValueError: the model, the checkpoint, the tokenizer or an option is invalid.
    """

    parameters = 986_109_775

    @staticmethod
    def sources(options: Mapping[str, Any]) -> tuple[RewardFile, ...]:
        model, checkpoint = options.get("model"), options.get("checkpoint")
        require_one(model, checkpoint)
        weights = RewardFile(model, CONFIG) if model else published_or(checkpoint, REPOSITORY, CHECKPOINT)
        return weights, tokenizer_file(model, options.get("processor"), DEFAULT_PROCESSOR)

    def __init__(
        self,
        model: str | None = None,
        processor: str | None = None,
        checkpoint: str | None = None,
        *,
        vision_heads: int = 16,
        text_heads: int = 16,
        device: str = "cpu",
        dtype: str = "float32",
        batch_size: int = 32,
    ) -> None:
        from transformers import CLIPModel

        options = {"model": model, "processor": processor, "checkpoint": checkpoint}
        weights, tokenizer = self.sources(options)
        if model:
            clip = pretrained(CLIPModel, model, dtype_named(dtype))
        else:
            clip = open_clip_model(weights.fetched(), vision_heads, text_heads, dtype_named(dtype))
        self._normalize = Normalize()
        super().__init__(
            clip,
            tokenizer_at(tokenizer.where),
            "open_clip's clean text; long side bicubic, padded",
            device=device,
            batch_size=batch_size,
        )

    def _pixels(self, images: Tensor) -> Tensor:
        return self._normalize(long_side_then_pad(images, self._side))

    def _clean(self, prompt: str) -> str:
        return clean_text(prompt)

    def _score(self, cosines: Tensor) -> Tensor:
        return cosines
