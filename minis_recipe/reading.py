"""Words read in generated images: by the nearest glyphs while a model trains, by two OCR engines afterwards.

`python -m minis_recipe.reading sample MODEL FILE` generates images of held-out words, with the model's weights and with
each of its snapshots. `python -m minis_recipe.reading read FILE` reads them with RapidOCR, the engine of the reward
`ocr`, and with Tesseract, which no reward uses. `python -m minis_recipe.reading groups MODEL` says how much better the
best of many candidates are. An image is right if its text is the word, in any case.
"""

import argparse
import copy
import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageOps
from safetensors.torch import load_file
from solrl_core.families import Backbone
from solrl_core.rewards.images import as_bytes
from solrl_core.rewards.ocr import Ocr, closeness
from solrl_proto.noise import expand_seeds

from minis_recipe import measure
from minis_recipe.words import CELL, CHARACTERS, WIDTH, Word, glyphs, sample_words

PROMPTS = 128
KEPT = 12
"""Best candidates of a group, of which `groups` takes the mean: half of those that the paper's recipes keep."""
_ENLARGED, _MARGIN = 3, 8


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


def by_tesseract(images: npt.NDArray[np.uint8]) -> list[str]:
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
        done = subprocess.run(
            ["tesseract", str(listed), "-", *options], capture_output=True, check=True, encoding="utf-8"
        )
    return [page.strip() for page in done.stdout.split("\f")[: len(images)]]


def exact(found: Sequence[str], wanted: Sequence[str]) -> npt.NDArray[np.bool_]:
    """Whether each text that was read is the wanted one, but for case and white space."""
    return np.array([one.casefold().split() == [other.casefold()] for one, other in zip(found, wanted, strict=True)])


def sample(model: Path, file: Path, device: str) -> None:
    """Generate images of held-out words with a model and its snapshots; print figures, write uint8 [N, 32, 64, 3]."""
    backbone = measure.load(model, device)
    snapshots = sorted((model.parent / "snapshots" / model.name).glob("*.safetensors"))
    weights = {path.stem: load_file(path) for path in snapshots}
    written: dict[str, Any] = {}
    for name, state in {**weights, "100": copy.deepcopy(backbone.transformer.state_dict())}.items():
        backbone.transformer.load_state_dict(state)
        for guidance in (3.0, 1.0):
            figures, images = accuracy(backbone, guidance=guidance)
            print(f"{name} %", json.dumps({"guidance": guidance, **figures}), flush=True)
        written[name] = as_bytes(images).numpy()
    np.savez_compressed(file, **written)


def right(images: torch.Tensor, words: Sequence[Word]) -> dict[str, npt.NDArray[np.bool_]]:
    """Engine → whether it reads each word in its image [N, 3, 32, 64]."""
    pixels, texts = as_bytes(images).numpy(), [word.text for word in words]
    return {"rapidocr": exact(by_rapidocr(pixels), texts), "tesseract": exact(by_tesseract(pixels), texts)}


def read(file: Path) -> None:
    """Print the share of images in which each engine reads the word."""
    words = [word for word in sample_words(True, PROMPTS, seed=0) for _ in range(measure.SEEDS)]
    for name, pixels in np.load(file).items():
        images = torch.from_numpy(pixels).permute(0, 3, 1, 2)
        print(name, {engine: float(hits.mean()) for engine, hits in right(images, words).items()}, flush=True)


def groups(model: Path, device: str, prompts: int, guidance: float) -> dict[str, float]:
    """Exact matches and rewards of RapidOCR: mean, and mean of the best 12 of 24 and of 96 candidates per prompt."""
    backbone, words = measure.load(model, device), sample_words(True, prompts, seed=0)
    rows = []
    for word in words:
        texts, seeds = [word.prompt] * measure.CANDIDATES, expand_seeds(0, word.prompt, measure.CANDIDATES)
        images = as_bytes(measure.sample(backbone, texts, seeds, measure.STEPS, guidance=guidance)).numpy()
        found = by_rapidocr(images)
        rows.append([exact(found, [word.text] * len(found)), [closeness(one, word.text) for one in found]])
    scores = np.array(rows, float)  # [prompts, 2, candidates]
    figures = {"exact": scores[:, 0].mean(), "reward": scores[:, 1].mean()}
    for count in (24, measure.CANDIDATES):
        best = np.sort(scores[:, :, :count])[:, :, -KEPT:]
        for index, name in enumerate(("exact", "reward")):
            figures[f"{name}_best_of_{count}"] = best[:, index].mean()
            figures[f"{name}_top_of_{count}"] = best[:, index, -1].mean()
    return {name: float(value) for name, value in figures.items()}


def main() -> None:
    """Run one of the three commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("sample", "read", "groups"))
    parser.add_argument("path", type=Path, help="folder of a model, or for `read` a file")
    parser.add_argument("file", type=Path, nargs="?", help="file that `sample` writes, .npz")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--guidance", type=float, default=1.0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    if args.command == "sample":
        sample(args.path, args.file, args.device)
    elif args.command == "read":
        read(args.path)
    else:
        print(json.dumps(groups(args.path, args.device, args.prompts, args.guidance)))


if __name__ == "__main__":
    main()
