"""CLIPScore, logits_per_image / 100 of a CLIP model, and PickScore.

Source: the FlowGRPO and DiffusionNFT reward servers.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from solrl_core.rewards.clip import ClipReward
from solrl_core.rewards.images import Normalize, as_pil, short_side_then_centre
from solrl_core.rewards.loading import (
    CONFIG,
    RewardFile,
    dtype_named,
    pretrained,
    processing_at,
    tokenizer_at,
    tokenizer_file,
)


class ClipScore(ClipReward):
    """Scores with any transformers CLIP.

    Args:
        model: folder or hub id; by default the published one.
        processor: folder or hub id of tokenizer and image processor; by default the model's.
        device, dtype, batch_size: device, dtype of the weights, and images per batch.

    Attributes:
        divisor: divisor of the model's logits.

    Raises:
        OSError: files are missing.
        ValueError: the model, the tokenizer or an option is invalid.
    """

    parameters = 427_616_847
    divisor = 100
    _model_id: ClassVar[str] = "openai/clip-vit-large-patch14"
    _processor_id: ClassVar[str | None] = None
    """Hub id of the processor; None for the model's own."""

    @classmethod
    def sources(cls, options: Mapping[str, Any]) -> tuple[RewardFile, ...]:
        model = options.get("model") or cls._model_id
        tokenizer = tokenizer_file(model, options.get("processor"), cls._processor_id or model)
        return RewardFile(model, CONFIG), tokenizer

    def __init__(
        self,
        model: str | None = None,
        processor: str | None = None,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        batch_size: int = 32,
    ) -> None:
        from transformers import CLIPImageProcessorPil, CLIPModel

        weights, processing = self.sources({"model": model, "processor": processor})
        clip = pretrained(CLIPModel, weights.where, dtype_named(dtype))
        images = processing_at(CLIPImageProcessorPil, processing.where, "an image processor")
        preprocessing = self._preprocess_by(images)
        super().__init__(clip, tokenizer_at(processing.where), preprocessing, device=device, batch_size=batch_size)

    def _preprocess_by(self, processor: Any) -> str:
        """Use an image processor of transformers; returns the description for the digest."""
        self._normalize = Normalize(processor.image_mean, processor.image_std)
        return f"{processor.image_mean} {processor.image_std}"

    def _pixels(self, images: Tensor) -> Tensor:
        return self._normalize(short_side_then_centre(images, self._side))

    def _score(self, cosines: Tensor) -> Tensor:
        scale: Tensor = self._model.logit_scale.float().exp()
        return cosines * scale / self.divisor


class PickScore(ClipScore):
    """Scores with a CLIP tuned on human preferences; 8-bit images go through transformers' image processor.

    It takes the arguments of `ClipScore`. By default, the processor is `model` if that is a folder, else the published
    one. Its score is exp(logit_scale) · cosine / 26.

    Source: Kirstain et al. 2023 (arXiv 2305.01569) and its reward servers.
    """

    parameters = 986_109_775
    divisor = 26
    _model_id = "yuvalkirstain/PickScore_v1"
    _processor_id = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"

    def _preprocess_by(self, processor: Any) -> str:
        self._processor = processor
        description: str = processor.to_json_string()
        return description

    def _pixels(self, images: Tensor) -> Tensor:
        pixels: Tensor = self._processor(images=as_pil(images), return_tensors="pt").pixel_values
        return pixels
