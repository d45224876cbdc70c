"""Object detectors of transformers, and the colours of what they find, by CLIP."""

from collections.abc import Sequence
from functools import lru_cache

import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from solrl_core.fingerprint import combined_digest, module_digest, tokenizer_digest
from solrl_core.rewards.clip import image_features, text_features
from solrl_core.rewards.geneval_rules import COLOURS, DetectedObject
from solrl_core.rewards.images import Normalize, pil_squares
from solrl_core.rewards.loading import dtype_named, pretrained, processing_at, tokenizer_at

ALIASES = {
    "aeroplane": "airplane",
    "diningtable": "dining table",
    "keyboard": "computer keyboard",
    "motorbike": "motorcycle",
    "mouse": "computer mouse",
    "pottedplant": "potted plant",
    "remote": "tv remote",
    "sofa": "couch",
    "tvmonitor": "tv",
}
"""Names of COCO's classes in detectors → names in GenEval's prompts, where they differ."""
_SOFTMAX = ("detr", "table-transformer", "yolos")
"""Types of detectors whose scores are probabilities over the classes."""
_TEMPLATES = ("a photo of a {colour} {name}", "a photo of a {colour}-colored {name}", "a photo of a {colour} object")


class Detector:
    """Finds objects in 8-bit images.

    Args:
        model: folder or hub id of a transformers model for object detection, with its image processor.
        device, dtype: of its weights.

    Attributes:
        names: names of the classes, as in GenEval's prompts.
        softmax: whether scores are probabilities over the classes, which are near 1 for a clear object; otherwise
            each class has a score by itself, which is lower.
        digest: digest of weights and preprocessing.

    Raises:
        OSError: files are missing.
        ValueError: the model or the dtype is invalid.
    """

    def __init__(self, model: str, *, device: str, dtype: str) -> None:
        from transformers import AutoModelForObjectDetection

        # Before 5.20, the name in `transformers` asks for torchvision, which this processor does not need.
        from transformers.models.auto.image_processing_auto import AutoImageProcessor

        network = pretrained(AutoModelForObjectDetection, model, dtype_named(dtype))
        self._processor = processing_at(AutoImageProcessor, model, "an image processor", backend="pil")
        self._labels = {at: ALIASES.get(name, name) for at, name in network.config.id2label.items()}
        self.softmax = network.config.model_type in _SOFTMAX
        self.names = frozenset(self._labels.values())
        self._model = network.to(device)
        self.digest = combined_digest(module_digest(network), self._processor.to_json_string())

    def find(self, image: Image.Image, least: float) -> list[DetectedObject]:
        """Objects of an image whose scores exceed `least`."""
        pixels = self._processor(images=image, return_tensors="pt").pixel_values
        output = self._model(pixel_values=pixels.to(self._model.device, self._model.dtype))
        (objects,) = self._processor.post_process_object_detection(
            output, threshold=least, target_sizes=[(image.height, image.width)]
        )
        rows = zip(objects["labels"].tolist(), objects["scores"].tolist(), objects["boxes"].tolist(), strict=True)
        return [DetectedObject(self._labels[label], score, *box) for label, score, box in rows]


class ColourNames:
    """Names the colour of a detected object by CLIP, as GenEval does for detectors without masks.

    Args:
        model: folder or hub id of a transformers CLIP with its tokenizer.
        device, dtype: of its weights.

    Attributes:
        digest: digest of weights, tokenizer and preprocessing.

    Raises:
        OSError: files are missing.
        ValueError: the model or the dtype is invalid.
    """

    def __init__(self, model: str, *, device: str, dtype: str) -> None:
        from transformers import CLIPModel

        clip = pretrained(CLIPModel, model, dtype_named(dtype))
        self._tokenizer = tokenizer_at(model)
        self._model = clip.to(device)
        self._side: int = clip.config.vision_config.image_size
        self._normalize = Normalize()
        self._classifier = lru_cache(maxsize=256)(self._make_classifier)
        self.digest = combined_digest(module_digest(clip), tokenizer_digest(self._tokenizer), *_TEMPLATES, *COLOURS)

    def of(self, image: Image.Image, name: str, objects: Sequence[DetectedObject]) -> list[str]:
        """Colour of each object of a class, one of `COLOURS`."""
        crops = [image.crop(_box(detected)) for detected in objects]
        pixels = self._normalize(pil_squares(crops, self._side))
        features = image_features(self._model, pixels)
        return [COLOURS[i] for i in (F.normalize(features, dim=-1) @ self._classifier(name).T).argmax(1).tolist()]

    def _make_classifier(self, name: str) -> Tensor:
        """Features [colours, D] of a class in each colour: means over the templates, of length 1."""
        texts = [template.format(colour=colour, name=name) for colour in COLOURS for template in _TEMPLATES]
        features = text_features(self._model, self._tokenizer, texts)
        means = F.normalize(features, dim=-1).view(len(COLOURS), len(_TEMPLATES), -1).mean(1)
        return F.normalize(means, dim=-1)


def _box(detected: DetectedObject) -> tuple[int, int, int, int]:
    """The object's box in whole pixels, at least one of each side, however far it leaves the image."""
    x, y = round(detected.left), round(detected.top)
    return x, y, max(round(detected.right), x + 1), max(round(detected.bottom), y + 1)
