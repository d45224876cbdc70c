"""Files of images and clips, and pictures of clips."""

import io
import re

import pytest
import torch
from PIL import Image
from solrl_core.image_files import FRAME_MS, for_showing, from_file, lossless_file, shrunk, tiled, webp


def noise(*shape: int) -> torch.Tensor:
    """Bytes."""
    return torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def floats(pixels: torch.Tensor) -> torch.Tensor:
    return pixels.movedim(-1, -3) / 255


def test_an_image_is_a_png_and_comes_back() -> None:
    pixels = noise(5, 7, 3)
    file = lossless_file(pixels)
    assert file.startswith(b"\x89PNG")
    assert torch.equal(from_file(file, 5, 7), floats(pixels))


@pytest.mark.parametrize("still", [(), (0, 1, 2), (1, 2), (3, 4), (0, 1, 2, 3, 4)], ids=str)
def test_a_clip_is_an_animated_webp_and_comes_back_with_its_equal_frames(still: tuple[int, ...]) -> None:
    pixels = noise(5, 12, 9, 3)
    pixels[list(still)] = pixels[still[0]].clone() if still else pixels[[]]
    file = lossless_file(pixels)
    assert file[8:12] == b"WEBP"
    assert torch.equal(from_file(file, 12, 9, 5), floats(pixels))


def test_another_picture_is_refused_before_it_is_decoded() -> None:
    # Files without their pixels: their heads alone say that they are of another size.
    large = lossless_file(noise(400, 300, 3))[:64]
    for file, frames, fault in (
        (large, 1, "got an image of 300 × 400 pixels and 1 frames; expected 9 × 12 pixels and at most 1 frames"),
        (large[:20], 1, "got 20 bytes that are no such image"),
        (b"", 1, "got 0 bytes that are no such image"),
        (lossless_file(noise(12, 9, 3))[:-200], 1, "no such image"),
        (webp(noise(12, 9, 3)), 1, "no such image"),
        (webp(noise(3, 12, 9, 3)), 2, "got an image of 9 × 12 pixels and 3 frames"),
        (webp(noise(3, 13, 9, 3)), 3, "got an image of 9 × 13 pixels and 3 frames"),
    ):
        with pytest.raises(ValueError, match=re.escape(fault)):
            from_file(file, 12, 9, frames)
    still = webp(noise(2, 12, 9, 3), frame_ms=10**6)
    assert from_file(still, 12, 9, 3).shape == (3, 3, 12, 9), "a frame that lasts for minutes is not repeated as often"


def test_a_webp_plays_at_the_frame_rate() -> None:
    with Image.open(io.BytesIO(webp(noise(4, 16, 16, 3), quality=50))) as image:
        assert (image.n_frames, image.info["loop"]) == (4, 0)
        image.seek(1)
        image.load()
        assert image.info["duration"] == FRAME_MS == pytest.approx(1000 / 16, abs=1)


def test_clips_are_shrunk_and_laid_out_in_rows_and_images_are_not() -> None:
    clips = torch.rand(2, 3, 3, 30, 512)
    shown = for_showing(clips)
    assert shown.shape == (2, 3, 3, 15, 256)
    assert torch.allclose(shown[1, 2], clips[1, 2].unflatten(1, (15, 2)).unflatten(3, (256, 2)).mean((2, 4)))
    assert torch.equal(for_showing(clips[:, 0]), clips[:, 0])
    assert shrunk(clips, 512) is clips
    clips = torch.arange(8.0).view(1, 8, 1, 1, 1).expand(2, 8, 3, 1, 1)
    assert tiled(clips, columns=4)[1, 0].tolist() == [[1, 3, 5, 7]]
    assert tiled(clips, columns=2)[1, 0].tolist() == [[1, 3], [5, 7]]
    assert tiled(clips[:, :2], columns=2)[1, 0].tolist() == [[0, 1]]
    assert torch.equal(tiled(clips[:, 0], columns=2), clips[:, 0])
