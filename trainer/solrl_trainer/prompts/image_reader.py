"""The reader of stored images: RGB with 8 bits per channel, upright, transparent parts on white."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import ExifTags, Image, ImageOps

FORMATS = ("PNG", "JPEG", "WEBP", "TIFF", "BMP", "GIF")
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "YCbCr")
_SIDEWAYS = range(5, 9)
"""EXIF orientations that exchange width and height."""


def image_size(path: Path) -> tuple[int, int]:
    """Width and height of an image as it is shown, by its header; a ValueError names one that `read_image` refuses."""
    with _opened(path) as image:
        width, height = image.size
        turned = image.getexif().get(ExifTags.Base.Orientation) in _SIDEWAYS
        return (height, width) if turned else (width, height)


def read_image(path: Path) -> Image.Image:
    """An image as RGB of 8 bits per channel, upright, transparent parts on white; colour profiles are not applied.

    A ValueError names a file that is no image, is broken, or has other pixels, and says what to do.
    """
    with _opened(path) as image:
        pixels = ImageOps.exif_transpose(image).convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", pixels.size, "white"), pixels).convert("RGB")


def same_shape(first: tuple[int, int], second: tuple[int, int]) -> bool:
    """Whether one size is the other scaled, up to a pixel's rounding of the smaller one."""
    (width, height), (wide, high) = sorted((first, second), reverse=True)
    return abs(height * wide / width - high) <= 1


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    Image.init()  # or Pillow does not know the formats by name
    try:
        with Image.open(path, formats=FORMATS) as image:
            # MPO is a camera's JPEG with further pictures behind it; the first picture is the image.
            frames = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)
            if image.mode not in _MODES or frames > 1:
                raise ValueError(f"got {frames} × {image.mode}: save one picture as RGB with 8 bits per channel")
            yield image
    # Damaged files raise all of these.
    except (OSError, ValueError, SyntaxError, MemoryError, Image.DecompressionBombError) as error:
        raise ValueError(f"{path}: expected an image of {', '.join(FORMATS)}; {error}") from error
