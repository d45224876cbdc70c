"""The reader of stored images: what they show on white, in sRGB with 8 bits per channel."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, ImageCms, ImageOps

FORMATS = ("PNG", "JPEG", "WEBP", "TIFF", "BMP", "GIF")
_PLAIN = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "YCbCr")
"""Modes of 8 bits or less whose colours are sRGB if no profile says otherwise."""
_DEEP = "I;16"
"""Beginning of the modes of grey images of 16 bits."""
_SIDEWAYS = range(5, 9)
"""EXIF orientations that exchange width and height."""
_DEEPEST = 65535


def image_size(path: Path) -> tuple[int, int]:
    """Width and height of an image as it is shown, by its header; a ValueError names one that `read_image` refuses."""
    with _opened(path) as image:
        width, height = image.size
        turned = image.getexif().get(ExifTags.Base.Orientation) in _SIDEWAYS
        return (height, width) if turned else (width, height)


def read_image(path: Path) -> Image.Image:
    """An image as viewers show it: RGB of 8 bits per channel, in sRGB, upright, transparent parts on white.

    A ValueError names a file that is no image, is broken, or does not say which colours it has, and says what to do.
    """
    with _opened(path) as image:
        return _on_white(ImageOps.exif_transpose(image))


def same_shape(first: tuple[int, int], second: tuple[int, int]) -> bool:
    """Whether one size is the other scaled, up to a pixel's rounding of the smaller one."""
    (width, height), (wide, high) = sorted((first, second), reverse=True)
    return abs(height * wide / width - high) <= 1


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    Image.init()  # or Pillow does not know the formats by name
    try:
        with Image.open(path, formats=FORMATS) as image:
            if fault := _fault(image):
                raise ValueError(fault)
            yield image
    # Damaged files raise all of these.
    except (OSError, ValueError, SyntaxError, MemoryError, ImageCms.PyCMSError, Image.DecompressionBombError) as error:
        raise ValueError(f"{path}: expected an image of {', '.join(FORMATS)}; {error}") from error


def _fault(image: Image.Image) -> str:
    """Why an image has no one meaning; empty if it has."""
    # MPO is a camera's JPEG with further pictures behind it, of which the first is the image.
    if image.format != "MPO" and (frames := getattr(image, "n_frames", 1)) > 1:
        return f"got {frames} frames or pages: save one of them as a file"
    if image.mode == "CMYK" and "icc_profile" not in image.info:
        return "got CMYK without a colour profile, so its colours are unknown: save it as RGB"
    if image.mode.startswith(_DEEP):
        return "got 16 bits with a transparent colour: save it with 8 bits" if "transparency" in image.info else ""
    if image.mode not in (*_PLAIN, "CMYK"):
        return f"got the pixel format {image.mode}, which has no fixed white: save it as RGB with 8 bits per channel"
    return ""


def _on_white(image: Image.Image) -> Image.Image:
    profile = image.info.get("icc_profile")
    if image.mode.startswith(_DEEP):
        values = np.asarray(image).astype(np.float32) / _DEEPEST
        image = Image.fromarray((values * 255).round().astype(np.uint8))
    alpha = image.convert("RGBA").getchannel("A") if image.has_transparency_data else None
    grey = image.mode in ("1", "L", "LA")
    colours = image if image.mode == "CMYK" else image.convert("L" if grey else "RGB")
    if profile:
        colours = _in_srgb(colours, profile)
    canvas = Image.new("RGB", image.size, "white")
    canvas.paste(colours.convert("RGB"), mask=alpha)
    return canvas


def _in_srgb(image: Image.Image, profile: bytes) -> Image.Image:
    embedded = ImageCms.ImageCmsProfile(io.BytesIO(profile))
    if image.mode == "L" and embedded.profile.xcolor_space.strip() == "RGB":  # as image editors save grey PNG
        image = image.convert("RGB")
    converted = ImageCms.profileToProfile(
        image, embedded, ImageCms.createProfile("sRGB"), ImageCms.Intent.RELATIVE_COLORIMETRIC, "RGB",
        flags=ImageCms.Flags.BLACKPOINTCOMPENSATION,
    )  # fmt: skip
    assert converted is not None  # it is None only in place
    return converted
