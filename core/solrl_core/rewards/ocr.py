"""Rendered text: closeness of the text that an OCR engine reads to the text that a prompt asks for.

Source: Liu et al. 2025 (Flow-GRPO, arXiv 2505.05470) and its reward, with RapidOCR instead of PaddleOCR.
"""

import os
import re
import threading
import unicodedata
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any, ClassVar

import numpy as np
import torch

from solrl_core.fingerprint import combined_digest, source_digest
from solrl_core.rewards.images import as_bytes
from solrl_core.rewards.metadata import refuse
from solrl_core.rewards.reward import checks_prompts

_DIRECTED = ("“”", "””", "„“”", "«»", "»«", "‹›", "「」", "『』")
"""Opening quotation mark → the marks that close it. Single marks are missing: they may be apostrophes."""
_QUOTED = re.compile(
    "|".join([r'(?<![0-9])"([^"]+)"', *(f"{marks[0]}([^{marks}]+)[{marks[1:]}]" for marks in _DIRECTED)])
)
"""A text in quotation marks; a straight one after a digit is of inches."""
_EMPTY = re.compile(r'(?<![^\s(\[{])""(?!\w)')
"""A pair of straight marks without a text, whose second mark would seem to open one."""
_ALIKE = str.maketrans("“”„‟«»″‘’‚‛′‐‑‒–—−", '"' * 7 + "'" * 5 + "-" * 6)
"""Characters that engines confuse with other characters."""


MOST_CHARACTERS = 512
"""Most characters of a prompt's text, and of its compared form: NFKC makes up to eighteen of a character."""


def wanted_text(prompt: str, metadata: Mapping[str, Any]) -> str:
    """Text that a prompt asks for: `text` of its metadata, else the first in double quotation marks of any script.

    Raises:
        ValueError: none, one that is not a text or is too long, or quotation marks that do not pair.
    """
    text = metadata.get("text")
    if text is None:
        return _of_some_length(_quoted(prompt), "text")
    if not (isinstance(text, str) and _visible(text)):
        refuse("metadata.text", text, 'the text that the image shows, such as "OPEN"')
    return _of_some_length(text, "metadata.text")


def _of_some_length(text: str, where: str) -> str:
    """The text, unless it is too long."""
    if _visible(text) > MOST_CHARACTERS:
        refuse(where, f"{_visible(text)} characters", f"a text of at most {MOST_CHARACTERS}, after Unicode's NFKC")
    return text


def _visible(text: str) -> int:
    """Number of a text's characters as it is compared, without folding one that is too long."""
    return len(text) if len(text) > MOST_CHARACTERS else len(_folded(text))


def _quoted(prompt: str) -> str:
    match = _QUOTED.search(_EMPTY.sub("", prompt))
    text = next(filter(None, match.groups())) if match else ""
    if not _visible(text):
        raise ValueError(
            'it has no text to render; expected one in double quotation marks, such as "…", “…”, „…“, «…» or 「…」, or '
            "as `text` of its metadata; single ones may be apostrophes"
        )
    if match and match[0].startswith('"') and text[-1].isdigit() and prompt.count('"') % 2:
        raise ValueError(
            f"its text may be {text!r}, or the quotation mark after {text[-1]} is of inches; expected pairs of marks, "
            "or the text as `text` of its metadata"
        )
    return text


_UNPADDED = {"Rec.rec_img_shape": [3, 48, 48]}
"""Least width of a line that the engine reads, 320 pixels by default."""
_THREADS = "EngineConfig.onnxruntime.intra_op_num_threads"
"""All cores by default, although runs beside this one may share them."""


@checks_prompts(wanted_text)
class Ocr:
    """Scores from 0 to 1 of the text that RapidOCR reads in images; it runs on the processor.

    `wanted_text` gives the text that a prompt asks for, such as HELLO for 'a sign that says "HELLO"'. The engine has
    torch's number of threads, or one with `line`: several would mostly wait for each other.

    Args:
        line: every image is one line of text, which the engine reads without looking for lines: tens of times faster.
        device: ignored.

    Attributes:
        digest: digest of the engine's version, whose package has its weights, of the score and of `wanted_text`.

    Raises:
        ValueError: the engine is not installed.
    """

    parameters = 0
    """Parameters on the device, for memory plans."""

    packages: ClassVar = {"rapidocr": "solrl[ocr]", "onnxruntime": "solrl[ocr]"}
    """Module that it imports → the requirement that installs it; `doctor` looks for them."""

    def __init__(self, line: bool = False, *, device: str = "cpu") -> None:
        self._line = line
        # Since 1.29, onnxruntime sends usage data to its maker, unless this is set before it is imported.
        os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
        try:
            from rapidocr import RapidOCR

            params = {"Global.log_level": "critical", _THREADS: 1 if line else torch.get_num_threads()}
            self._engine = RapidOCR(params=params | ({"Rec.rec_batch_num": 32, **_UNPADDED} if line else {}))
        except ImportError as error:  # of the engine's own packages, too
            raise ValueError(f"its packages are missing ({error}); install them: pip install 'solrl[ocr]'") from error
        self._reading = threading.Lock()
        self.digest = combined_digest(f"rapidocr {version('rapidocr')}{' line' * line}", source_digest(closeness))

    def __call__(
        self, images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> torch.Tensor:
        """Score images [N, 3, H, W] in [0, 1] with N prompts and their metadata; float32 [N].

        Raises:
            ValueError: the numbers of images and prompts differ, or a prompt asks for no text.
        """
        if not len(images) == len(prompts) == len(metadata):
            raise ValueError(f"got {len(images)} images and {len(prompts)} prompts; expected one prompt per image")
        targets = [wanted_text(prompt, row) for prompt, row in zip(prompts, metadata, strict=True)]
        read = self.read(as_bytes(images))
        return torch.tensor([closeness(*pair) for pair in zip(read, targets, strict=True)], dtype=torch.float32)

    def read(self, images: torch.Tensor) -> list[str]:
        """Text in each image, uint8 [N, H, W, 3], its lines joined."""
        pixels = [image.flip(-1).numpy() for image in images]  # as OpenCV has them: blue, green, red
        with self._reading:
            if self._line:
                return list(self._engine.recognize_txt(pixels).txts) if pixels else []
            return ["".join(self._engine(image).txts or ()) for image in pixels]


def closeness(read: str, target: str) -> float:
    """1 − edit distance / length of the wanted text, at least 0; 1 if it is part of what was read.

    Case, white space, the width of characters and the kind of quotation marks and dashes do not count.
    """
    read, target = _folded(read), _folded(target)
    return 1.0 if target in read else max(0.0, 1 - edit_distance(read, target) / len(target))


def _folded(text: str) -> str:
    """The visible characters of a text, in a form that is equal for texts that `closeness` takes for equal."""
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text.translate(_ALIKE)).casefold())
    return "".join(letter for letter in folded if not (letter.isspace() or unicodedata.category(letter) == "Cf"))


def edit_distance(source: str, target: str) -> int:
    """Least number of insertions, deletions and replacements of characters between two texts (Levenshtein's)."""
    letters = np.array([ord(letter) for letter in target], int)
    places = np.arange(len(target) + 1)
    row = places
    for count, letter in enumerate(source, 1):
        row = np.concatenate(([count], np.minimum(row[1:] + 1, row[:-1] + (letters != ord(letter)))))
        row = np.minimum.accumulate(row - places) + places  # insertions
    return int(row[-1])
