"""Image preprocessing with torchvision's rounding, without torchvision.

Shapes: N images, H height, W width, S side of the square that a model takes.
"""

from collections.abc import Iterable

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

OPENAI_MEAN = (0.48145466, 0.4578275, 0.40821073)
OPENAI_STD = (0.26862954, 0.26130258, 0.27577711)
_SHORT_SIDE = 224


def shape_with_short_side(height: int, width: int, side: int) -> tuple[int, int]:
    """(height, width) scaled so that the shorter is `side`; the longer is truncated, as in torchvision's Resize."""
    long = int(side * max(height, width) / min(height, width))
    return (side, long) if height <= width else (long, side)


def scored_pixels(height: int, width: int) -> int:
    """Pixels of an image, or of what rewards make of it if that is more: most scale its shorter side to 224."""
    scaled_height, scaled_width = shape_with_short_side(height, width, _SHORT_SIDE)
    return max(height * width, scaled_height * scaled_width)


def centre(height: int, width: int, side: int) -> tuple[int, int]:
    """(top, left) of the centre square, rounded half to even, as in torchvision's CenterCrop."""
    return round((height - side) / 2), round((width - side) / 2)


def short_side_then_centre(images: torch.Tensor, side: int) -> torch.Tensor:
    """Images [N, 3, H, W] → [N, 3, S, S]: resize the shorter side to S (bilinear, antialiased), crop the centre."""
    height, width = images.shape[-2:]
    size = shape_with_short_side(height, width, side)
    if size != (height, width):
        images = F.interpolate(images, size=size, mode="bilinear", antialias=True)
    y, x = centre(*size, side)
    return images[..., y : y + side, x : x + side]


def long_side_then_pad(images: torch.Tensor, side: int) -> torch.Tensor:
    """Images [N, 3, H, W] → [N, 3, S, S]: resize the longer side to S (bicubic, antialiased, unclamped), pad black."""
    height, width = images.shape[-2:]
    scale = side / max(height, width)
    size = (round(height * scale), round(width * scale))
    if scale != 1.0:
        images = F.interpolate(images, size=size, mode="bicubic", antialias=True)
    down, across = side - size[0], side - size[1]
    return F.pad(images, (across // 2, across - across // 2, down // 2, down - down // 2))


def as_bytes(images: torch.Tensor) -> torch.Tensor:
    """Images [..., 3, H, W] in [0, 1] → uint8 [..., H, W, 3] on the CPU, rounded to nearest on the images' device."""
    return as_uint8(images).movedim(-3, -1).contiguous().cpu()


def as_uint8(images: torch.Tensor) -> torch.Tensor:
    """Images [..., 3, H, W] in [0, 1] → uint8, rounded to nearest on the images' device; uint8 as it is."""
    if images.dtype == torch.uint8:
        return images
    return (images * 255).round().clamp(0, 255).to(torch.uint8)


def as_floats(images: torch.Tensor) -> torch.Tensor:
    """Images uint8 → float32 in [0, 1], on the images' device."""
    return images.float() / 255


def as_pil(images: torch.Tensor) -> list[Image.Image]:
    """Images [..., 3, H, W] in [0, 1] as 8-bit RGB, rounded to nearest; of clips, each frame."""
    return [Image.fromarray(pixels) for pixels in as_bytes(images.flatten(0, -4)).numpy()]


def pil_squares(images: Iterable[Image.Image], side: int) -> torch.Tensor:
    """Resize the shorter side of 8-bit images to S (PIL's bicubic, clamped to 8 bits), then crop the centre.

    Returns:
        float32 [N, 3, S, S] in [0, 1].
    """
    squares = []
    for image in images:
        height, width = shape_with_short_side(image.height, image.width, side)
        y, x = centre(height, width, side)
        resized = image.resize((width, height), Image.Resampling.BICUBIC)
        squares.append(np.asarray(resized.crop((x, y, x + side, y + side))))
    return torch.from_numpy(np.stack(squares)).permute(0, 3, 1, 2).float() / 255


class Normalize:
    """(x − mean) / std per channel of images [N, 3, H, W], in float32 on the images' device."""

    def __init__(self, mean: tuple[float, ...] = OPENAI_MEAN, std: tuple[float, ...] = OPENAI_STD) -> None:
        self._mean, self._std = (torch.tensor(values)[:, None, None] for values in (mean, std))

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        return (images - self._mean.to(images.device)) / self._std.to(images.device)
