"""Resizing of images for rewards."""

import pytest
import torch
import torch.nn.functional as F
from gpu_marks import GPU
from solrl_core.rewards.images import resized, resizing_weights

SIZES = [(224, 194), (64, 100), (600, 300)]


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", SIZES)
def test_products_with_weights_resize_as_torch_does(mode: str, size: tuple[int, int]) -> None:
    images = torch.rand(2, 3, 300, 260)
    down, across = (resizing_weights(old, new, mode) for old, new in zip((300, 260), size, strict=True))
    torch.testing.assert_close(down @ images @ across.mT, resized(images, size, mode), atol=1e-6, rtol=0)


@GPU
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", SIZES)
def test_a_gpu_resizes_as_torch_does(mode: str, size: tuple[int, int]) -> None:
    images = torch.rand(2, 3, 300, 260)
    expected = F.interpolate(images, size=size, mode=mode, antialias=True)
    torch.testing.assert_close(resized(images.cuda(), size, mode).cpu(), expected, atol=2e-6, rtol=0)
