"""Words read in generated images: by the nearest glyphs while a model trains, by two OCR engines afterwards.

RapidOCR is the engine of the reward `ocr`; no reward uses Tesseract. An image is right if its text is the word, in any
case.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from solrl_core.families import Backbone
from solrl_core.rewards.images import as_bytes
from solrl_core.rewards.ocr import Ocr, closeness
from solrl_core.tesseract import read_by_tesseract, reads_exactly
from solrl_proto.noise import expand_seeds

from minis_recipe import measure
from minis_recipe.words import CELL, CHARACTERS, WIDTH, Word, glyphs, sample_words

PROMPTS = 128
KEPT = 12
"""Best candidates of a group, of which `groups` takes the mean: half of those that the paper's recipes keep."""


def accuracy(
    backbone: Backbone, count: int | None = None, guidance: float = 1.0
) -> tuple[dict[str, Any], torch.Tensor]:
    """Share of right characters and words over 4 images of each held-out prompt at 10 steps, by the nearest glyphs.

    Returns:
        The figures, and the images [N, 3, 32, 64] in [0, 1].
    """
    words = [word for word in sample_words(True, count or PROMPTS, seed=0) for _ in range(measure.SEEDS)]
    seeds = [seed for word in words[:: measure.SEEDS] for seed in expand_seeds(1, word.prompt, measure.SEEDS)]
    images = measure.sample(backbone, [word.prompt for word in words], seeds, measure.STEPS, guidance=guidance)
    hits = [
        [one == other for one, other in zip(found, word.text, strict=True)]
        for found, word in zip(nearest(images, words), words, strict=True)
    ]
    figures = {
        "nearest_glyphs": float(np.mean([all(row) for row in hits])),
        "characters": float(np.mean([one for row in hits for one in row])),
        "images": len(words),
    }
    return figures, images


def nearest(images: torch.Tensor, words: Sequence[Word]) -> list[str]:
    """Text of each image [N, 3, 32, 64], if it has as many characters as its word: in each cell the nearest glyph."""
    shapes = glyphs()
    paper = images[:, :, :2].mean((2, 3), keepdim=True)
    cover = (images - paper).norm(dim=1)
    cover = cover / cover.flatten(1).quantile(0.95, 1)[:, None, None].clamp(min=0.1)
    texts = []
    for one, word in zip(cover.clamp(max=1), words, strict=True):
        start = (WIDTH - len(word.text) * CELL) // 2
        cells = one[:, start : WIDTH - start].unflatten(1, (-1, CELL)).transpose(0, 1)
        found = (cells[:, None] - shapes).square().sum((2, 3)).argmin(1)
        texts.append("".join(CHARACTERS[index] for index in found))
    return texts


def by_rapidocr(images: npt.NDArray[np.uint8]) -> list[str]:
    """Text that RapidOCR's recogniser reads in each image [N, H, W, 3]."""
    return Ocr(line=True).read(torch.from_numpy(images))


def exact(found: Sequence[str], wanted: Sequence[str]) -> npt.NDArray[np.bool_]:
    """Whether each text that was read is the wanted one, but for case and white space."""
    return np.array([reads_exactly(*pair) for pair in zip(found, wanted, strict=True)])


def right(images: torch.Tensor, words: Sequence[Word]) -> dict[str, npt.NDArray[np.bool_]]:
    """Engine → whether it reads each word in its image [N, 3, 32, 64]."""
    pixels, texts = as_bytes(images).numpy(), [word.text for word in words]
    return {"rapidocr": exact(by_rapidocr(pixels), texts), "tesseract": exact(read_by_tesseract(pixels), texts)}


def groups(backbone: Backbone, prompts: int) -> dict[str, float]:
    """Exact matches and rewards of RapidOCR: mean, and mean of the best 12 of 24 and of 96 candidates per prompt."""
    rows = []
    for word in sample_words(True, prompts, seed=0):
        texts, seeds = [word.prompt] * measure.CANDIDATES, expand_seeds(0, word.prompt, measure.CANDIDATES)
        found = by_rapidocr(as_bytes(measure.sample(backbone, texts, seeds, measure.STEPS)).numpy())
        rows.append([exact(found, [word.text] * len(found)), [closeness(one, word.text) for one in found]])
    scores = np.array(rows, float)  # [prompts, 2, candidates]
    figures = {}
    for index, name in enumerate(("exact", "reward")):
        figures[name] = float(scores[:, index].mean())
        for count in (24, measure.CANDIDATES):
            best = np.sort(scores[:, index, :count])[:, -KEPT:]
            figures[f"{name}_best_of_{count}"] = float(best.mean())
    return figures
