"""grid.png: images before and after a run, side by side."""

import math
import textwrap
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib
import torch
from PIL import Image, ImageDraw, ImageFont
from solrl_core.image_files import tiled

from solrl_trainer.evaluation.gallery import Gallery
from solrl_trainer.run_folder.figures import judging_text
from solrl_trainer.run_folder.output_files import writing

COLUMNS = 4
MARGIN = 40
HEADING = 122
"""Height of the three lines above the first row."""
GAP = 6
"""Space between the two images of a prompt."""
GUTTER = 40
"""Space between columns of prompts."""
STRIP = 30
"""Height of a mark, below its image."""
CAPTION = 46
"""Height of a prompt in two lines, above its images."""
SMALLEST_WIDTH = 860
"""Smallest width of a page, which its heading needs."""
SMALLEST_SIDE = 160
"""Least displayed length of an image's longer side."""
LARGEST_SIDE = 256
ROW_GAP = 18
LABELS = 26

_PAPER, _INK, _DIM, _EDGE = "#ffffff", "#1c1f24", "#6a717c", "#d8dce2"
_GOOD, _BAD = "#14804a", "#c2362b"
_FONTS = Path(matplotlib.get_data_path()) / "fonts" / "ttf"


Size = tuple[int, int]
"""Width and height in pixels."""


def shown_size(width: int, height: int) -> Size:
    """Displayed size of an image, in its own shape: small ones grow by a whole factor, large ones shrink."""
    longer = max(width, height)
    factor = min(math.ceil(SMALLEST_SIDE / longer), LARGEST_SIDE / longer)
    return round(width * factor), round(height * factor)


def corner(index: int, size: Size) -> tuple[int, int]:
    """Left and top of a prompt's image before; the image after is the displayed width + `GAP` to its right."""
    row, column = divmod(index, COLUMNS)
    width = 2 * size[0] + GAP
    height = CAPTION + size[1] + STRIP + ROW_GAP
    return MARGIN + column * (width + GUTTER), HEADING + LABELS + row * height + CAPTION


def write_grid(gallery: Gallery, path: Path, name: str, about: str, rows: int = 16) -> Path:
    """Draw the first `rows` prompts, before and after, with captions and marks, below the run's name and description.

    The prompts are the first held-out ones in their original order, never a selection.
    """
    count = min(rows, len(gallery.prompts))
    tiles = 1 if gallery.before.ndim == 4 else 2
    size = wide, high = shown_size(gallery.before.shape[-1] * tiles, gallery.before.shape[-2] * tiles)
    columns = min(COLUMNS, max(count, 1))
    width = max(2 * MARGIN + columns * (2 * wide + GAP) + (columns - 1) * GUTTER, SMALLEST_WIDTH)
    bottom = corner(max(count - 1, 0), size)[1] + high + STRIP + MARGIN // 2
    page = Image.new("RGB", (width, bottom), _PAPER)
    draw = ImageDraw.Draw(page)
    _headline(draw, name, about, gallery, count)
    for column in range(columns):
        left_edge = corner(column, size)[0]
        for x, text in ((left_edge, "before"), (left_edge + wide + GAP, "after")):
            draw.text((x + wide / 2, HEADING), text, _DIM, _font(15, bold=True), anchor="ma")
    for index in range(count):
        left_edge, top = corner(index, size)
        lines = _fit(gallery.prompts[index], 2 * wide + GAP)
        draw.multiline_text((left_edge, top - 6), lines, _INK, _font(15), anchor="ld", spacing=3)
        for after, images in enumerate((gallery.before, gallery.after)):
            x = left_edge + after * (wide + GAP)
            page.paste(_picture(images[index], size), (x, top))
            draw.rectangle((x - 1, top - 1, x + wide, top + high), outline=_EDGE)
            if gallery.verdicts is not None:
                mark, colour = ("✓", _GOOD) if gallery.verdicts.marks[index][after] else ("✗", _BAD)
                draw.text((x + wide / 2, top + high + STRIP / 2), mark, colour, _font(22), anchor="mm")
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path):
        page.save(path)
    return path


def _headline(draw: Any, name: str, about: str, gallery: Gallery, count: int) -> None:
    first = "The first held-out prompt" if count == 1 else f"The first {count} held-out prompts, in order, not selected"
    text = f"{first}; same seed before and after"
    if (verdicts := gallery.verdicts) is not None:
        was, now = (sum(mark[i] for mark in verdicts.marks[:count]) for i in (0, 1))
        text += f"; {judging_text(verdicts.by)} {was} before, {now} after"
    width = draw.im.size[0] - 2 * MARGIN
    for top, line, colour, size, bold in ((24, name, _INK, 22, True), (56, about, _INK, 15, False)):
        draw.text((MARGIN, top), _fit(line, width, size, max_lines=1, bold=bold), colour, _font(size, bold=bold))
    draw.text((MARGIN, 80), _fit(text, width, size=14, max_lines=1), _DIM, _font(14))


def _picture(image: torch.Tensor, size: Size) -> Image.Image:
    picture = Image.fromarray(tiled(image[None], columns=2)[0].permute(1, 2, 0).numpy())
    method = Image.Resampling.BICUBIC if picture.width < size[0] else Image.Resampling.LANCZOS
    return picture.resize(size, method)


def _fit(text: str, width: int, size: int = 15, max_lines: int = 2, *, bold: bool = False) -> str:
    """Break `text` into at most `max_lines` lines of `width` pixels, ending in an ellipsis if it does not fit."""
    text = " ".join(text.split())
    font = _font(size, bold=bold)
    for letters in range(len(text) + 1, 8, -1):
        lines = textwrap.wrap(text, letters) or [""]
        if len(lines) > max_lines:
            lines = [*lines[: max_lines - 1], lines[max_lines - 1][: letters - 1] + "…"]
        if all(font.getlength(line) <= width for line in lines):
            return "\n".join(lines)
    return text[:8]


@cache
def _font(size: int, *, bold: bool = False) -> Any:
    return ImageFont.truetype(str(_FONTS / ("DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf")), size)
