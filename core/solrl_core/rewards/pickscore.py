"""PickScore: exp(logit_scale) · cosine / 26. Source: Kirstain et al. 2023 (arXiv 2305.01569) and its reward servers."""

from typing import Any

from torch import Tensor

from solrl_core.rewards.clipscore import ClipScore
from solrl_core.rewards.images import as_pil


class PickScore(ClipScore):
    """Scores with a CLIP tuned on human preferences; 8-bit images go through transformers' image processor.

    It takes the arguments of `ClipScore`. By default, the processor is `model` if that is a folder, else the published
    one.
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
