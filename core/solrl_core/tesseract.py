"""Words that Tesseract reads, an OCR engine that no reward uses: a program of its own."""

import string
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

CHARACTERS = string.ascii_uppercase + string.digits
"""All that it may read."""
_ENLARGED, _MARGIN = 3, 8


def read_by_tesseract(images: npt.NDArray[np.uint8]) -> list[str]:
    """Text that the program `tesseract` reads in each image [N, H, W, 3], as a line of capitals and digits."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{index}.png" for index in range(len(images))]
        for file, pixels in zip(files, images, strict=True):
            paper = tuple(int(value) for value in pixels[:2].mean((0, 1)))
            picture = ImageOps.expand(Image.fromarray(pixels), _MARGIN, paper)
            large = picture.resize((picture.width * _ENLARGED, picture.height * _ENLARGED), Image.Resampling.BICUBIC)
            ImageOps.autocontrast(large.convert("L")).save(file)
        listed = Path(folder) / "files.txt"
        listed.write_text("".join(f"{file}\n" for file in files), encoding="utf-8")
        options = ["--psm", "7", "-c", f"tessedit_char_whitelist={CHARACTERS}"]
        process = subprocess.run(
            ["tesseract", str(listed), "-", *options], capture_output=True, check=True, encoding="utf-8"
        )
    return [page.strip() for page in process.stdout.split("\f")[: len(images)]]


def reads_exactly(read: str, expected: str) -> bool:
    """Whether a text that was read is the one that was asked for, but for case and white space."""
    return read.casefold().split() == [expected.casefold()]
