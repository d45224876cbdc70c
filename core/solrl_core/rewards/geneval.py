"""GenEval's score with a detector of transformers: 1 if an image shows what its prompt's metadata asks for, else 0."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from solrl_core.fingerprint import combined_digest, source_digest
from solrl_core.rewards.detector import ColourNames, Detector
from solrl_core.rewards.geneval_rules import (
    COUNTING,
    COUNTING_THRESHOLD,
    THRESHOLD,
    DetectedObject,
    check_metadata,
    is_correct,
    kept_objects,
)
from solrl_core.rewards.images import as_pil
from solrl_core.rewards.loading import CONFIG, TOKENIZER, RewardFile
from solrl_core.rewards.reward import checks_prompts

DEFAULT_MODEL = "PekingU/rtdetr_r50vd"
DEFAULT_CLIP = "openai/clip-vit-large-patch14"


_SIGMOID_COUNTING_THRESHOLD = 0.5
"""Threshold for detectors with a score for each class by itself; not measured with published weights."""
_COUNTED = 24
"""Least number of images of counting prompts for judging their scores: a chunk of candidates."""

logger = logging.getLogger(__name__)


class _Counting:
    """Likeliest objects of the first images of counting prompts, and a warning if none exceeds the threshold."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._likeliest: list[float] = []

    def add(self, score: float) -> None:
        if len(self._likeliest) == _COUNTED:
            return
        self._likeliest.append(score)
        if len(self._likeliest) == _COUNTED and (likeliest := max(self._likeliest)) <= self._threshold:
            logger.warning(
                f"geneval: 0 of {_COUNTED} images of counting prompts have any object above counting_threshold "
                f"{self._threshold:g}, so none counts; the likeliest has {likeliest:.2f}: give the reward's option "
                "counting_threshold what suits the detector, or the images show nothing that it knows"
            )


@checks_prompts(lambda text, metadata: check_metadata(metadata))
class GenEval:
    """Scores images by GenEval's rules on the boxes of any detector of transformers.

    GenEval itself detects by Mask2Former, whose masks it uses for colours; so rates of other detectors are comparable
    with each other, not with published ones.

    Args:
        model: folder or hub id of a transformers model for object detection, of COCO's classes.
        clip: folder or hub id of the transformers CLIP that names colours.
        threshold: score that an object must exceed.
        counting_threshold: that of prompts with the tag "counting"; by default GenEval's 0.9 for detectors whose scores
            are a softmax, as Mask2Former's are, and 0.5 for other detectors, such as RT-DETR.
        device, dtype: device, and dtype of the weights.

    Attributes:
        digest: digest of weights, preprocessing, thresholds and rules.

    Raises:
        OSError: files are missing.
        ValueError: a model or an option is invalid.
    """

    parameters = 470_508_219

    @staticmethod
    def sources(options: Mapping[str, Any]) -> tuple[RewardFile, ...]:
        clip = options.get("clip", DEFAULT_CLIP)
        return (
            RewardFile(options.get("model", DEFAULT_MODEL), CONFIG),
            RewardFile(clip, CONFIG, "clip"),
            RewardFile(clip, TOKENIZER, "clip"),
        )

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        clip: str = DEFAULT_CLIP,
        *,
        threshold: float = THRESHOLD,
        counting_threshold: float | None = None,
        device: str = "cpu",
        dtype: str = "float32",
    ) -> None:
        if not (0 <= threshold < 1 and 0 <= (counting_threshold or 0) < 1):
            raise ValueError(
                f"got threshold {threshold} and counting_threshold {counting_threshold}; expected 0 to below 1"
            )
        self._detector = Detector(model, device=device, dtype=dtype)
        self._colours = ColourNames(clip, device=device, dtype=dtype)
        if counting_threshold is None:
            counting_threshold = COUNTING_THRESHOLD if self._detector.softmax else _SIGMOID_COUNTING_THRESHOLD
        self._counting = _Counting(counting_threshold)
        self._thresholds = {"threshold": threshold, "counting_threshold": counting_threshold}
        self.digest = combined_digest(
            self._detector.digest, self._colours.digest, str(self._thresholds), source_digest(is_correct)
        )

    @torch.inference_mode()
    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> Tensor:
        """Score images [N, 3, H, W] in [0, 1] with N rows of GenEval's metadata; float32 [N], 0 or 1.

        Raises:
            ValueError: the numbers of images and rows differ, or a row is not valid or names a class that the detector
                does not have.
        """
        if len(images) != len(metadata):
            raise ValueError(f"got {len(images)} images and {len(metadata)} rows of metadata; expected one per image")
        for row in metadata:
            self._check(row)
        scores = [float(self._shows(image, row)) for image, row in zip(as_pil(images), metadata, strict=True)]
        return torch.tensor(scores, dtype=torch.float32)

    def _shows(self, image: Image.Image, metadata: Mapping[str, Any]) -> bool:
        def colours(name: str, objects: Sequence[DetectedObject]) -> list[str]:
            return self._colours.of(image, name, objects)

        objects = self._detector.find(image, min(self._thresholds.values()))
        if metadata.get("tag") == COUNTING:
            self._counting.add(max((detected.score for detected in objects), default=0.0))
        return is_correct(kept_objects(objects, metadata, **self._thresholds), metadata, colours)

    def _check(self, metadata: Mapping[str, Any]) -> None:
        check_metadata(metadata)
        named = {item["class"] for part in ("include", "exclude") for item in metadata.get(part, [])}
        if unknown := sorted(named - self._detector.names):
            raise ValueError(
                f"got class {unknown[0]!r}; expected one that the detector has: {sorted(self._detector.names)}"
            )
