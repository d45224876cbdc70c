"""Gallery: images of a run, saved in its folder so that grid and report can be redrawn without a model."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from solrl_core.image_files import small_images
from solrl_proto.text_files import read_json

from solrl_trainer.records.evaluations import Verdicts
from solrl_trainer.rollouts.image_comparisons import ImageComparison
from solrl_trainer.run_folder.output_files import write_file

IMAGES = "gallery.safetensors"
TEXTS = "gallery.json"
KEPT_PROMPTS = 64
"""Number of prompts saved, in order; for a 1024 px model, all of them would take gigabytes."""
KEPT_PIXELS = 2**18
"""More prompts are saved of small images, up to this many pixels: 128 of 64 × 32."""
KEPT_CLIPS = 16
LARGEST_SIDE = 512
"""Larger images are scaled down to this side in pixels."""


@dataclass(frozen=True)
class Gallery:
    """Images of prompts before and after a run, with the same seed in both, and pairs of explored and regenerated ones.

    Attributes:
        before, after: [N, 3, H, W], one row per prompt; clips [N, F, 3, H, W]. Floats in [0, 1] until the gallery is
            saved, then uint8.
        verdicts: on each row's images before and after; None without a reward that gives one.
        explored, regenerated: likewise, one for each of the pairs, with the same seeds.
    """

    prompts: Sequence[str]
    before: torch.Tensor
    after: torch.Tensor
    verdicts: Verdicts | None = None
    pairs: Sequence[ImageComparison] = ()
    explored: torch.Tensor | None = None
    regenerated: torch.Tensor | None = None
    seeds: Sequence[int] = ()


def save_gallery(folder: Path, gallery: Gallery) -> None:
    """Write gallery.safetensors and gallery.json, with the first prompts: as many as fit `KEPT_PIXELS`, but at least
    `KEPT_PROMPTS`; `KEPT_CLIPS` of clips."""
    before, explored, regenerated = gallery.before, gallery.explored, gallery.regenerated
    count = max(KEPT_PROMPTS, KEPT_PIXELS // math.prod(before.shape[-2:])) if before.ndim == 4 else KEPT_CLIPS
    tensors = {"before": before[:count], "after": gallery.after[:count]}
    tensors |= {"explored": explored} if explored is not None else {}
    tensors |= {"regenerated": regenerated} if regenerated is not None else {}
    verdicts = gallery.verdicts
    texts = {
        "prompts": list(gallery.prompts[:count]),
        "seeds": list(gallery.seeds[:count]),
        "marks": None if verdicts is None else [list(mark) for mark in verdicts.marks[:count]],
        "marked_by": None if verdicts is None else verdicts.by,
        "pairs": [asdict(pair) for pair in gallery.pairs],
    }
    # save_file would create a file that only its owner can read.
    write_file(folder / IMAGES, save({name: small_images(images, LARGEST_SIDE) for name, images in tensors.items()}))
    write_file(folder / TEXTS, json.dumps(texts, indent=1))


def load_gallery(folder: Path) -> Gallery:
    """Load a gallery; a FileNotFoundError if the folder has none."""
    if not (folder / TEXTS).is_file() or not (folder / IMAGES).is_file():
        raise FileNotFoundError(f"{folder} contains no gallery ({IMAGES}, {TEXTS}); a run writes it when it ends")
    texts = read_json(folder / TEXTS)
    images = load_file(folder / IMAGES)
    marks = texts["marks"]
    return Gallery(
        prompts=texts["prompts"],
        before=images["before"],
        after=images["after"],
        verdicts=None if marks is None else Verdicts(texts["marked_by"], [(a, b) for a, b in marks]),
        pairs=[ImageComparison(**pair) for pair in texts["pairs"]],
        explored=images.get("explored"),
        regenerated=images.get("regenerated"),
        seeds=texts["seeds"],
    )
