"""LAION's aesthetic predictor: an MLP on CLIP's image features. Source: improved-aesthetic-predictor, 2022."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from solrl_core.fingerprint import combined_digest, module_digest
from solrl_core.rewards.batched import BatchedReward
from solrl_core.rewards.images import Normalize, as_pil, pil_squares
from solrl_core.rewards.loading import (
    CONFIG,
    RewardFile,
    dtype_named,
    listed,
    pretrained,
    published_or,
    read_checkpoint,
)

DEFAULT_MODEL = "openai/clip-vit-large-patch14"
REPOSITORY, CHECKPOINT = "trl-lib/ddpo-aesthetic-predictor", "aesthetic-model.pth"
"""Copy of sac+logos+ava1-l14-linearMSE.pth on the hub."""


class Aesthetic(BatchedReward):
    """Scores images, not prompts, from about 1 to 10; 8-bit images go through PIL, as in the published code.

    Args:
        model: folder or hub id of the transformers CLIP whose image features the head takes.
        checkpoint: file of the head, as published. The default downloads it from the hub.
        device, dtype, batch_size: device, dtype of CLIP's weights, and images per batch; the head is in float32.

    Attributes:
        digest: digest of weights and preprocessing.

    Raises:
        OSError: files are missing.
        ValueError: the model, the checkpoint or an option is invalid.
    """

    parameters = 304_894_177

    @staticmethod
    def sources(options: Mapping[str, Any]) -> tuple[RewardFile, ...]:
        head = published_or(options.get("checkpoint"), REPOSITORY, CHECKPOINT)
        return RewardFile(options.get("model", DEFAULT_MODEL), CONFIG), head

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        checkpoint: str | None = None,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        batch_size: int = 32,
    ) -> None:
        from transformers import CLIPVisionModelWithProjection

        super().__init__(device, batch_size)
        clip = pretrained(CLIPVisionModelWithProjection, model, dtype_named(dtype))
        head = head_at(published_or(checkpoint, REPOSITORY, CHECKPOINT).fetched())
        width = clip.config.projection_dim
        if head[0].in_features != width:
            raise ValueError(
                f"got a head for {head[0].in_features} features and {model!r}, which has {width}; expected the CLIP "
                "that the head was trained with as option `model`, for the published one ViT-L/14"
            )
        self._model, self._head = clip.to(device), head.to(device)
        self._side: int = clip.config.image_size
        self._normalize = Normalize()
        self.digest = combined_digest(module_digest(clip), module_digest(head), "bicubic, centre; features of length 1")

    def _scores(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        pixels = self._normalize(pil_squares(as_pil(images), self._side))
        features = self._model(pixel_values=pixels.to(self._device, self._model.dtype)).image_embeds.float()
        scores: Tensor = self._head(F.normalize(features, dim=-1))[:, 0]
        return scores


def head_at(path: str) -> nn.Sequential:
    """Load the head of a published checkpoint; its dropouts, which have no weights, are left out.

    Raises:
        OSError: no such file.
        ValueError: not such a checkpoint.
    """
    from solrl_core.rewards.blip import mlp

    tensors = read_checkpoint(path)
    named = re.compile(r"layers\.(\d+)\.(?:weight|bias)")
    numbers = sorted({int(match[1]) for name in tensors if (match := named.fullmatch(name))})
    expected = {f"layers.{number}.{kind}" for number in numbers for kind in ("weight", "bias")}
    wrong = expected ^ tensors.keys()
    if not numbers or wrong:
        raise ValueError(
            f"{path!r} has the wrong tensors ({listed(wrong)}); expected the head of LAION's aesthetic predictor, as "
            "sac+logos+ava1-l14-linearMSE.pth: layers.0.weight, layers.0.bias, …"
        )
    shapes = [tuple(tensors[f"layers.{number}.weight"].shape) for number in numbers]
    head = mlp(shapes[0][-1], tuple(shape[0] for shape in shapes[:-1]))
    try:
        head.load_state_dict(
            {
                f"{position}.{kind}": tensors[f"layers.{number}.{kind}"].float()
                for position, number in enumerate(numbers)
                for kind in ("weight", "bias")
            }
        )
    except RuntimeError as error:
        raise ValueError(f"{path!r} has weights of shapes {shapes}, no MLP with one output: {error}") from error
    return head.eval().requires_grad_(False)
