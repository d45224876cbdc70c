"""Sizes of thumbnails are read from their headers, as Pillow reads them."""

import io

import pytest
from PIL import Image
from solrl_rollout.http.routes.status import _header_size


@pytest.mark.parametrize("options", [{"lossless": True}, {"lossless": False}, {"save_all": True}, None])
@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
@pytest.mark.parametrize("size", [(1, 1), (128, 77), (129, 5000)])
def test_the_size_in_the_header_equals_pillows(
    size: tuple[int, int], mode: str, options: dict[str, bool] | None
) -> None:
    file = io.BytesIO()
    image = Image.new(mode, size, "teal")
    image.putpixel((0, 0), (1, 2, 3, 4)[: len(mode)])
    if options is None:
        image.save(file, "PNG")
    elif "save_all" in options:
        image.save(file, "WEBP", save_all=True, append_images=[Image.new(mode, size, "navy")])
    else:
        image.save(file, "WEBP", **options)
    assert _header_size(file.getvalue()) == size
