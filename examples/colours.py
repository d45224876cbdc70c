"""The reward of the examples, a stand-in for yours: service and trainer both import it."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def redness(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """Score images, float32 [N, 3, H, W] in [0, 1], with one number each."""
    return images[:, 0].mean((1, 2)) - images[:, 1:].mean((1, 2, 3))
