"""Images in answers of a rollout service."""

import base64
import io

import numpy as np
import torch
from PIL import Image


def from_png(text: str) -> torch.Tensor:
    """Decode a base64 PNG into float32 [3, H, W] in [0, 1]."""
    image = Image.open(io.BytesIO(base64.b64decode(text))).convert("RGB")
    return torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).float() / 255
