"""Files of samples: images as PNG, clips as animated WebP, and clips as pictures of some frames."""

import io
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import interpolate

from solrl_core.rewards.frames import evenly

FRAME_MS = 62
"""Milliseconds of a frame: Wan's 16 frames per second, in the whole milliseconds of a WebP."""
SHOWN_SIDE = 256
"""Pixels of a clip's longer side where it is only shown: whole clips of an iteration take gigabytes."""
_TILES = 4


def lossless_file(pixels: torch.Tensor) -> bytes:
    """PNG of an image, uint8 [H, W, 3]; animated WebP of a clip, uint8 [F, H, W, 3]."""
    if pixels.ndim == 4:
        return webp(pixels, lossless=True, quality=0, method=0)  # the fastest; better ones take seconds a clip
    file = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(file, "PNG")
    return file.getvalue()


def from_file(data: bytes, height: int, width: int, frames: int = 1) -> torch.Tensor:
    """The image [3, H, W], or clip [F, 3, H, W] of more than one frame, of a `lossless_file`; float32 in [0, 1].

    Raises:
        ValueError: it is another file, or of another size or length. A file of another size is not decoded.
    """
    expected = f"{width} × {height} pixels and at most {frames} frames, as {'PNG' if frames == 1 else 'WebP'}"
    images: list[torch.Tensor] = []
    try:
        with Image.open(io.BytesIO(data), formats=("PNG" if frames == 1 else "WEBP",)) as image:
            count = getattr(image, "n_frames", 1)
            if image.size != (width, height) or count > frames:
                got = f"{image.width} × {image.height} pixels and {count} frames"
                raise ValueError(f"got an image of {got}; expected {expected}")
            for index in range(count):
                image.seek(index)
                pixels = torch.from_numpy(np.array(image.convert("RGB"))).movedim(-1, 0).float() / 255
                # Equal frames in a row are stored as one that is shown longer, and all of them as an image.
                lasts = max(1, round(image.info.get("duration", 0) / FRAME_MS))
                images += [pixels] * min(lasts, frames - len(images))
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:  # as Pillow finds it
        raise ValueError(f"got {len(data)} bytes that are no such image ({error}); expected {expected}") from error
    images += images[-1:] * (frames - len(images))
    return torch.stack(images) if frames > 1 else images[0]


def webp(pixels: torch.Tensor, *, frame_ms: int = FRAME_MS, **options: Any) -> bytes:
    """WebP of an image, uint8 [H, W, 3], or an animated one of a clip, uint8 [F, H, W, 3], that repeats.

    Args:
        pixels: on the CPU.
        frame_ms: milliseconds of each frame.
        options: options of Pillow's encoder.
    """
    first, *frames = map(Image.fromarray, pixels.numpy().reshape(-1, *pixels.shape[-3:]))
    animated = {"save_all": True, "append_images": frames, "duration": frame_ms, "loop": 0} if frames else {}
    file = io.BytesIO()
    first.save(file, "WEBP", **animated, **options)
    return file.getvalue()


def for_showing(images: torch.Tensor) -> torch.Tensor:
    """Images [N, 3, H, W] as they are; clips [N, F, 3, H, W] with at most `SHOWN_SIDE` pixels a side."""
    return shrunk(images, SHOWN_SIDE) if images.ndim == 5 else images


def shrunk(images: torch.Tensor, side: int) -> torch.Tensor:
    """Floats [..., 3, H, W] with at most `side` pixels a side, by the mean of areas."""
    longest = max(images.shape[-2:])
    if longest <= side:
        return images
    size = [max(1, round(length * side / longest)) for length in images.shape[-2:]]
    flat = images.reshape(-1, *images.shape[-3:])
    return interpolate(flat, size=size, mode="area").view(*images.shape[:-2], *size)


def small_images(images: torch.Tensor, side: int) -> torch.Tensor:
    """Images or clips float [..., 3, H, W] in [0, 1] as uint8 on the CPU, shrunk to at most `side` pixels a side."""
    images = shrunk(images.detach().float().cpu(), side)
    return (images.clamp(0, 1) * 255).round().to(torch.uint8).contiguous()


def tiled(images: torch.Tensor, columns: int) -> torch.Tensor:
    """Images [N, 3, H, W] as they are; of clips [N, F, 3, H, W], four frames in rows of `columns`, [N, 3, …, …]."""
    if images.ndim == 4:
        return images
    frames = images[:, evenly(_TILES, images.shape[1])]
    return torch.cat([torch.cat(row.unbind(1), -1) for row in torch.split(frames, columns, 1)], -2)
