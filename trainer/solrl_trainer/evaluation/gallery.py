"""Gallery: images of a run, saved in its folder so that grid and report can be redrawn without a model."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from solrl_proto.text_files import read_json

from solrl_trainer.records.evaluations import small_images
from solrl_trainer.records.output_files import write_file
from solrl_trainer.rollouts.pairs import Pair

IMAGES = "gallery.safetensors"
TEXTS = "gallery.json"
KEPT_PROMPTS = 64
"""Number of prompts saved, in order; for a 1024 px model, all of them would take gigabytes."""
KEPT_CLIPS = 16
LARGEST_SIDE = 512
"""Larger images are scaled down to this side in pixels."""


@dataclass(frozen=True)
class Gallery:
    """A saved gallery.

    Attributes:
        before, after: uint8 [N, 3, H, W], one row per prompt, with the same seed in both; clips [N, F, 3, H, W].
        marks: the verifier's verdict on each row's images before and after; None if it was not a reward.
        explored, regenerated: uint8, likewise, one for each of the pairs, with the same seeds.
    """

    prompts: list[str]
    before: torch.Tensor
    after: torch.Tensor
    marks: list[tuple[bool, bool]] | None
    pairs: list[Pair]
    explored: torch.Tensor | None
    regenerated: torch.Tensor | None


def save_gallery(
    folder: Path,
    *,
    prompts: Sequence[str],
    before: torch.Tensor,
    after: torch.Tensor,
    marks: Sequence[tuple[bool, bool]] | None,
    pairs: Sequence[Pair],
    explored: torch.Tensor | None,
    regenerated: torch.Tensor | None,
) -> None:
    """Write gallery.safetensors and gallery.json, with the first `KEPT_PROMPTS` prompts, or `KEPT_CLIPS` for clips.

    Args:
        folder: the run's folder.
        prompts: captions of `before` and `after`.
        before, after: images or clips, floats in [0, 1], same prompts and seeds.
        marks: the verifier's verdicts before and after.
        pairs: descriptions of `explored` and `regenerated`.
        explored: the images that were ranked, one for each pair.
        regenerated: images of the same seeds in BF16.

    Raises:
        ValueError: the numbers of texts and images differ.
    """
    count = len(prompts)
    lengths = {"before": (len(before), count), "after": (len(after), count)}
    if marks is not None:
        lengths["marks"] = (len(marks), count)
    for name, images in (("explored", explored), ("regenerated", regenerated)):
        if images is not None:
            lengths[name] = (len(images), len(pairs))
    for name, (got, expected) in lengths.items():
        if got != expected:
            raise ValueError(f"gallery: got {got} rows of {name}; expected {expected}")

    kept = KEPT_PROMPTS if before.ndim == 4 else KEPT_CLIPS
    tensors = {"before": before[:kept], "after": after[:kept]}
    tensors |= {"explored": explored} if explored is not None else {}
    tensors |= {"regenerated": regenerated} if regenerated is not None else {}
    texts = {
        "prompts": list(prompts[:kept]),
        "marks": None if marks is None else [list(mark) for mark in marks[:kept]],
        "pairs": [asdict(pair) for pair in pairs],
    }
    # save_file would create a file that only its owner can read.
    write_file(folder / IMAGES, save({name: small_images(images, LARGEST_SIDE) for name, images in tensors.items()}))
    write_file(folder / TEXTS, json.dumps(texts, indent=1))


def load_gallery(folder: Path) -> Gallery:
    """Load a gallery.

    Raises:
        FileNotFoundError: the folder has none.
    """
    if not (folder / TEXTS).is_file() or not (folder / IMAGES).is_file():
        raise FileNotFoundError(f"{folder} contains no gallery ({IMAGES}, {TEXTS}); a run writes it when it ends")
    texts = read_json(folder / TEXTS)
    images = load_file(folder / IMAGES)
    marks = texts["marks"]
    return Gallery(
        prompts=texts["prompts"],
        before=images["before"],
        after=images["after"],
        marks=None if marks is None else [(was, now) for was, now in marks],
        pairs=[Pair(**pair) for pair in texts["pairs"]],
        explored=images.get("explored"),
        regenerated=images.get("regenerated"),
    )
