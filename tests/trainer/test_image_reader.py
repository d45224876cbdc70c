"""Stored images of every kind, read as RGB or refused before anything is loaded."""

import os
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from solrl_trainer.prompts.image_reader import image_size, read_image, same_shape
from solrl_trainer.prompts.stored_files import check_images, contents_digest

DARK_RED = (120, 10, 10)


def two_frames() -> dict[str, Any]:
    return {"save_all": True, "append_images": [Image.new("RGB", (4, 2), "red")]}


def palette() -> Image.Image:
    image = Image.new("P", (4, 2), 1)
    image.putpalette([0, 0, 0, *DARK_RED])
    return image


def turned() -> Image.Exif:
    exif = Image.Exif()
    exif[0x112] = 6
    return exif


@pytest.mark.parametrize(
    ("image", "name", "options", "colour"),
    [
        (Image.new("RGBA", (4, 2), (*DARK_RED, 0)), "hidden.png", {}, (255, 255, 255)),
        (Image.new("RGBA", (4, 2), (255, 0, 0, 128)), "half.webp", {"lossless": True}, (255, 127, 127)),
        (Image.new("LA", (4, 2), (0, 0)), "hidden.png", {}, (255, 255, 255)),
        (palette(), "shown.png", {}, DARK_RED),
        (palette(), "hidden.gif", {"transparency": 1}, (255, 255, 255)),
        (Image.new("RGB", (4, 2), DARK_RED), "hidden.png", {"transparency": DARK_RED}, (255, 255, 255)),
        (Image.new("L", (2, 4), 100), "turned.jpg", {"exif": turned()}, (100, 100, 100)),
        (Image.new("L", (4, 2), 100), "camera.mpo", two_frames(), (100, 100, 100)),
    ],
)
def test_an_image_is_read_upright_and_on_white(
    image: Image.Image, name: str, options: dict[str, Any], colour: tuple[int, ...], tmp_path: Path
) -> None:
    image.save(tmp_path / name, **options)
    shown = read_image(tmp_path / name)
    assert (shown.mode, shown.size, image_size(tmp_path / name)) == ("RGB", (4, 2), (4, 2))
    assert shown.getpixel((0, 0)) == shown.getpixel((3, 1)) == colour


def test_images_without_one_meaning_are_refused_by_their_headers(tmp_path: Path) -> None:
    for image, name, options, text in (
        (Image.new("F", (4, 2)), "float.tif", {}, "got 1 × F: save one picture as RGB"),
        (Image.new("I;16", (4, 2)), "deep.png", {}, "got 1 × I;16: save"),
        (Image.new("CMYK", (4, 2)), "print.jpg", {}, "got 1 × CMYK: save"),
        (Image.new("RGB", (4, 2)), "moving.gif", two_frames(), "got 2 × "),
        (Image.new("RGB", (4, 2)), "moving.png", two_frames(), "got 2 × "),
        (Image.new("RGB", (4, 2)), "pages.tif", two_frames(), "got 2 × "),
        (Image.new("RGB", (4, 2)), "other.ico", {}, "cannot identify"),
    ):
        image.save(tmp_path / name, **options)
        with pytest.raises(ValueError, match=rf"{name}: expected an image of PNG, .*{text}"):
            check_images({"id": (tmp_path / name,)})
    chunks = (b"IHDR" + struct.pack(">IIBBBBB", 60000, 60000, 8, 2, 0, 0, 0), b"IDAT")
    found = [struct.pack(">I", len(one) - 4) + one + struct.pack(">I", zlib.crc32(one)) for one in chunks]
    (tmp_path / "bomb.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(found))
    with pytest.raises(ValueError, match=r"bomb\.png: .*3600000000 pixels.* exceeds limit"):
        check_images({"id": (tmp_path / "bomb.png",)})
    Image.new("RGB", (64, 64)).save(tmp_path / "whole.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "whole.png").read_bytes()[:60])
    with pytest.raises(ValueError, match=r"cut\.png: .*truncated"):
        read_image(tmp_path / "cut.png")


def test_images_of_a_pair_have_one_shape(tmp_path: Path) -> None:
    assert same_shape((1024, 683), (512, 342))
    assert same_shape((512, 342), (1024, 683))
    assert not same_shape((100, 200), (200, 100))
    for name, size in (("square", (64, 64)), ("large", (128, 128)), ("wide", (64, 60))):
        Image.new("RGB", size).save(tmp_path / f"{name}.png")
    check_images({"id": (tmp_path / "square.png", tmp_path / "large.png")})
    with pytest.raises(ValueError, match=r"square\.png has 64×64 pixels, and wide\.png of the same pair has 64×60"):
        check_images({"id": (tmp_path / "square.png", tmp_path / "wide.png")})


def test_another_image_of_equal_size_and_time_changes_the_digest(tmp_path: Path) -> None:
    digests = set()
    for folder, value in (("one", 1), ("two", 2)):
        path = tmp_path / folder / "image.bmp"
        path.parent.mkdir()
        Image.new("L", (8, 8), value).save(path)
        os.utime(path, (0, 0))
        digests.add(contents_digest({"id": (path,)}))
    assert len(digests) == 2
