"""Images as they are kept, tracked and reported: bytes, and not too large."""

import torch
from torch.nn.functional import interpolate


def small_images(images: torch.Tensor, side: int) -> torch.Tensor:
    """Images float [N, 3, H, W] in [0, 1] as uint8 on the CPU, shrunk to at most `side` pixels a side."""
    images = images.detach().float().cpu()
    longest = max(images.shape[-2:])
    if longest > side:
        size = [max(1, round(length * side / longest)) for length in images.shape[-2:]]
        images = interpolate(images, size=size, mode="area")
    return (images.clamp(0, 1) * 255).round().to(torch.uint8).contiguous()
