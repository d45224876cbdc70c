"""Validation of thumbnails, because browsers decode whatever they are sent."""

import base64
import binascii
import io
import struct

from PIL import Image, UnidentifiedImageError
from solrl_proto.problems import ProblemError, ProblemKind
from solrl_proto.status import THUMBNAIL_SIDE, Samples

_UNSIGNED_24 = (1 << 24) - 1


def check_thumbnails(samples: Samples) -> None:
    """Refuse samples unless every thumbnail is a small image.

    Raises:
        ProblemError: 422 `thumbnail`.
    """
    for i, pair in enumerate(samples.pairs):
        for name in ("explored", "regenerated"):
            fault = _fault(getattr(pair, name))
            if fault is not None:
                raise ProblemError(
                    ProblemKind.THUMBNAIL,
                    "a thumbnail is not a small image",
                    where=f"body.samples.pairs.{i}.{name}",
                    got=fault,
                    expected=f"a WebP or PNG of at most {THUMBNAIL_SIDE} pixels a side",
                    action="shrink it, or omit the samples",
                )


def _fault(text: str) -> object:
    """The size of an image that is too large, the error's name for anything but an image, or None if it is fine."""
    try:
        data = base64.b64decode(text, validate=True)
        # Before Pillow opens it: decoders allocate memory by the header, gigabytes for an image of 60,000² pixels.
        if max(size := _header_size(data)) > THUMBNAIL_SIDE:
            return size
        with Image.open(io.BytesIO(data), formats=("WEBP", "PNG")) as image:
            return image.size if max(image.size) > THUMBNAIL_SIDE else None
    except (binascii.Error, UnidentifiedImageError, OSError, ValueError, SyntaxError, struct.error) as error:
        return type(error).__name__


def _header_size(data: bytes) -> tuple[int, int]:
    """Width and height from the header of a PNG or a WebP; (0, 0) for anything else.

    Sources: PNG specification 11.2.2 (IHDR); RFC 9649 sections 2.5 to 2.7 (VP8, VP8L and VP8X headers).
    """
    if data.startswith(b"\x89PNG"):
        width, height = struct.unpack_from(">II", data, 16)
        return width, height
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        kind = data[12:16]
        if kind == b"VP8X":
            (width,), (height,) = struct.unpack_from("<I", data, 24), struct.unpack_from("<I", data, 27)
            return (width & _UNSIGNED_24) + 1, (height & _UNSIGNED_24) + 1
        if kind == b"VP8L":
            (bits,) = struct.unpack_from("<I", data, 21)
            return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    return 0, 0
