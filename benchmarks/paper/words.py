"""Images of words, as runs on text leave them: read afterwards by two engines, and drawn."""

import json
import shutil
import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from minis_recipe.reading import by_rapidocr, exact
from PIL import Image, ImageDraw, ImageFont
from solrl_core.rewards.images import as_bytes
from solrl_core.rewards.ocr import wanted_text
from solrl_core.tesseract import read_by_tesseract

from paper.finished import Finished, file_of, write_record
from paper.intervals import Values

Images = npt.NDArray[np.uint8]
ENGINES = {"rapidocr": "RapidOCR", "tesseract": "Tesseract"}
"""Names of the engine that the reward `ocr` asks, and of one that no reward asks."""
READERS = {"rapidocr": by_rapidocr, "tesseract": read_by_tesseract}
WORDS = "words.png"
"""Ending of the file with a finished run's images."""
SHOWN = 8
"""Prompts of a picture, the first held-out ones."""
_COLUMNS, _SCALE, _GAP, _CAPTION = 4, 3, 24, 30


def save_images(before: torch.Tensor, after: torch.Tensor, path: Path) -> None:
    """Write images [N, 3, H, W] in [0, 1] of a run's base and of its averaged weights, one above the other."""
    strip = as_bytes(torch.cat([before, after])).flatten(0, 1).numpy()
    Image.fromarray(strip).save(path, optimize=True)


def load_images(path: Path, prompts: int) -> tuple[Images, Images]:
    """The images [prompts, H, W, 3] before and after."""
    with Image.open(path) as strip:
        pixels = np.array(strip)
    before, after = pixels.reshape(2, prompts, -1, *pixels.shape[1:])
    return before, after


def read_words(runs: Iterable[Finished], folder: Path) -> int:
    """Let both engines read the images of finished runs that have some, and add what they read to the runs' files.

    Returns:
        The number of runs that were read. 0, with a message, where an engine is missing.
    """
    unread = [run for run in runs if run.prompts and not run.words and file_of(run.name, folder, WORDS).is_file()]
    lacking = [
        name
        for name, is_there in (("rapidocr", find_spec("rapidocr")), ("tesseract", shutil.which("tesseract")))
        if not is_there
    ]
    if unread and lacking:
        print(
            f"the words of {len(unread)} runs are not read, because {' and '.join(lacking)} is missing; expected "
            "`pip install 'solrl[ocr]'` and `apt install tesseract-ocr`: then use --show",
            file=sys.stderr,
        )
        return 0
    for run in unread:
        pixels = np.concatenate(load_images(file_of(run.name, folder, WORDS), len(run.prompts)))
        found = {name: [text.strip() for text in read(pixels)] for name, read in READERS.items()}
        count = len(run.prompts)
        words = {name: {"before": texts[:count], "after": texts[count:]} for name, texts in found.items()}
        path = file_of(run.name, folder)
        write_record(path, {**json.loads(path.read_text()), "words": words})
    return len(unread)


def right(run: Finished, engine: str, when: str) -> Values:
    """1 for each held-out prompt [prompts] whose word an engine read exactly, but for case, else 0."""
    return exact(run.words[engine][when], [wanted_text(prompt, {}) for prompt in run.prompts]).astype(np.float64)


def draw(prompts: Sequence[str], images: Path, path: Path) -> None:
    """Draw the first prompts of a run: the image before above the one after, of the same seed, and the prompt below."""
    both = load_images(images, len(prompts))
    height, width = (_SCALE * side for side in both[0].shape[1:3])
    rows = -(-min(SHOWN, len(prompts)) // _COLUMNS)
    font = ImageFont.load_default(18)
    left = 70
    cell = (width + _GAP, 2 * height + 4 + _CAPTION + _GAP)
    page = Image.new("RGB", (left + _COLUMNS * cell[0], _GAP + rows * cell[1]), "white")
    pen = ImageDraw.Draw(page)
    for index, prompt in enumerate(prompts[:SHOWN]):
        row, column = divmod(index, _COLUMNS)
        x, y = left + column * cell[0], _GAP + row * cell[1]
        for number, (said, images) in enumerate(zip(("before", "after"), both, strict=True)):
            top = y + number * (height + 4)
            large = Image.fromarray(images[index]).resize((width, height), Image.Resampling.BICUBIC)
            page.paste(large, (x, top))
            if not column:
                pen.text((left - 8, top + height // 2), said, "#6a717c", font, anchor="rm")
        pen.text((x + width // 2, y + 2 * height + 4 + _CAPTION // 2), prompt, "#1c1f24", font, anchor="mm")
    path.parent.mkdir(parents=True, exist_ok=True)
    page.convert("P", palette=Image.Palette.ADAPTIVE).save(path, optimize=True)
