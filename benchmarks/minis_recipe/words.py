"""The text world: words of two to four capitals and digits in one of four colours, such as `"K7" in red`.

A word is a random string, so that a model must spell it. Its characters stand in cells of 16 × 32 pixels, centred in an
image of 64 × 32, as `glyphs.png` has them: those of DejaVu Sans Mono Bold, 26 points large.
"""

import hashlib
import string
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from solrl_minis.scenes import PALETTE
from solrl_minis.world import COLOURS

CHARACTERS = string.ascii_uppercase + "123456789"
"""Without zero, which readers take for the letter O."""
INKS = ("red", "green", "blue", "purple")
LENGTHS = (2, 3, 4)
HEIGHT, WIDTH, CELL = 32, 64, 16
HELD_OUT_PERCENT = 15
MISSPELT = 0.45
GLYPHS = Path(__file__).parent / "glyphs.png"


@dataclass(frozen=True)
class Word:
    """A word and its colour."""

    text: str
    ink: str

    @property
    def prompt(self) -> str:
        """Prompt in the wording of the world."""
        return f'"{self.text}" in {self.ink}'

    @property
    def held_out(self) -> bool:
        """Whether the text is held out, in all colours: nothing in this project trains on it."""
        digest = hashlib.sha256(self.text.encode()).digest()
        return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT

    @property
    def metadata(self) -> dict[str, Any]:
        """Metadata as the reward `ocr` takes it; `tag` is the number of characters."""
        return {"tag": f"{len(self.text)} characters", "text": self.text}


class WordSource:
    """Draws words, all lengths and colours equally often, and misspells them.

    A source of training words never draws a held-out variant either.
    """

    def __init__(self, seed: int, held_out: bool = False) -> None:
        self.rng = np.random.default_rng(seed)
        self._held_out = held_out
        self._glyphs = glyphs()

    def draw(self, count: int) -> list[Word]:
        """Draw `count` words."""
        words: list[Word] = []
        while len(words) < count:
            characters = self.rng.integers(len(CHARACTERS), size=LENGTHS[self.rng.integers(len(LENGTHS))])
            text = "".join(CHARACTERS[one] for one in characters)
            word = Word(text, INKS[self.rng.integers(len(INKS))])
            if word.held_out == self._held_out:
                words.append(word)
        return words

    def change(self, word: Word) -> Word:
        """Misspell a word: replace each of its characters with a probability of 0.45; all may stay."""
        while True:
            wrong = self.rng.random(len(word.text)) < MISSPELT
            drawn = self.rng.integers(len(CHARACTERS), size=len(word.text))
            changed = [CHARACTERS[j] if w else one for one, w, j in zip(word.text, wrong, drawn, strict=True)]
            other = replace(word, text="".join(changed))
            if self._held_out or not other.held_out:
                return other

    def caption(self, word: Word) -> str:
        """The prompt of a word."""
        return word.prompt

    def images(self, words: Sequence[Word], device: str) -> torch.Tensor:
        """Render one image per word on a light background, with slightly varied colours; [N, 3, 32, 64] in [0, 1]."""
        generator = torch.Generator().manual_seed(int(self.rng.integers(2**31)))
        grey = 0.86 + 0.12 * torch.rand(len(words), 1, generator=generator)
        paper = (grey + 0.015 * torch.randn(len(words), 3, generator=generator)).clamp(0, 1).to(device)
        ink = PALETTE[[COLOURS.index(word.ink) for word in words]]
        ink = (ink + 0.03 * torch.randn(ink.shape, generator=generator)).clamp(0, 1).to(device)
        cover = self.cover([word.text for word in words]).to(device)[:, None]
        return torch.lerp(paper[:, :, None, None], ink[:, :, None, None], cover)

    def cover(self, texts: Sequence[str]) -> torch.Tensor:
        """Share of each pixel that is ink, [N, 32, 64]."""
        cover = torch.zeros(len(texts), HEIGHT, WIDTH)
        for length in LENGTHS:
            rows = [row for row, text in enumerate(texts) if len(text) == length]
            indices = torch.tensor([CHARACTERS.index(one) for row in rows for one in texts[row]], dtype=torch.long)
            start = (WIDTH - length * CELL) // 2
            found = self._glyphs[indices].view(len(rows), length, HEIGHT, CELL)
            line = found.transpose(1, 2).reshape(len(rows), HEIGHT, length * CELL)
            cover[rows, :, start : start + length * CELL] = line
        return cover


def glyphs() -> torch.Tensor:
    """Share of ink of each pixel of each character, [35, 32, 16]."""
    return torch.from_numpy(np.array(Image.open(GLYPHS))).view(HEIGHT, -1, CELL).transpose(0, 1) / 255


def sample_words(held_out: bool, count: int, seed: int) -> list[Word]:
    """Sample `count` words of one split with different texts."""
    source, words = WordSource(seed, held_out), dict[str, Word]()
    while len(words) < count:
        for word in source.draw(count):
            words.setdefault(word.text, word)
    return list(words.values())[:count]
