"""Verifier of the shapes world: grades how well an image matches its prompt's metadata.

It segments the image by colour, classifies the shape of each connected region by its overlap with ideal outlines, and
compares the detected objects with the requested ones. It uses neither the prompt's text nor a learned model.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy import ndimage
from solrl_core.rewards.reward import checks_prompts

from solrl_minis.scenes import PALETTE, signed_distance
from solrl_minis.world import COLOURS, SHAPES, check_metadata

MIN_AREA = 14
"""Smallest region in pixels that counts as an object."""
MIN_OVERLAP = 0.74
"""Least intersection over union with the best outline for a region to have that shape."""
SMALL_BELOW = 18.0
"""Objects with a side below this many pixels are small; other objects are large."""

_GRID = 24
_PALETTE = PALETTE.numpy()


def _outlines() -> npt.NDArray[np.bool_]:
    axis = (torch.arange(_GRID) + 0.5) / _GRID * 2 - 1
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    x, y = (20 * grid.expand(len(SHAPES), -1, -1) for grid in (x, y))
    inside = signed_distance(x, y, torch.tensor(20.0), torch.arange(len(SHAPES))[:, None, None]) < 0
    return inside.numpy()


@dataclass(frozen=True)
class DetectedObject:
    """An object in an image: colour, shape, centre and side in pixels. `shape` is None if no outline fits."""

    colour: str
    shape: str | None
    x: float
    y: float
    side: float


def find_objects(image: npt.NDArray[np.float32]) -> list[DetectedObject]:
    """Detect the objects in one image, [3, H, W] in [0, 1]."""
    pixels = image.transpose(1, 2, 0)
    border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    background = np.median(border, axis=0)
    ink = _PALETTE - background
    # Project each pixel on the line from the background to each colour: position along it, and distance from it.
    offset = pixels - background
    along = np.einsum("hwc,kc->hwk", offset, ink) / np.maximum((ink**2).sum(-1), 1e-9)
    off = np.linalg.norm(offset[:, :, None] - along[..., None] * ink, axis=-1)
    colour = np.where(along > 0.35, off, np.inf).argmin(-1)
    solid = np.take_along_axis(along, colour[..., None], -1)[..., 0] > 0.5

    objects = []
    for index, name in enumerate(COLOURS):
        labels, _ = ndimage.label(solid & (colour == index))
        for label, box in enumerate(ndimage.find_objects(labels), start=1):
            mask = labels[box] == label
            if mask.sum() < MIN_AREA:
                continue
            rows, columns = box
            objects.append(
                DetectedObject(
                    colour=name,
                    shape=_classify_shape(mask),
                    x=(columns.start + columns.stop) / 2,
                    y=(rows.start + rows.stop) / 2,
                    side=float(np.mean(mask.shape)),
                )
            )
    return objects


def _classify_shape(mask: npt.NDArray[np.bool_]) -> str | None:
    if max(mask.shape) > 1.5 * min(mask.shape):
        return None
    rows = ((np.arange(_GRID) + 0.5) * mask.shape[0] / _GRID).astype(int)
    columns = ((np.arange(_GRID) + 0.5) * mask.shape[1] / _GRID).astype(int)
    scaled = mask[rows][:, columns]
    overlap = (scaled & _OUTLINES).sum((1, 2)) / (scaled | _OUTLINES).sum((1, 2))
    best = int(overlap.argmax())
    return SHAPES[best] if overlap[best] >= MIN_OVERLAP else None


_OUTLINES = _outlines()


@dataclass(frozen=True)
class Verdict:
    """Grades of one image, each 0 to 1; `position` and `size` are None if the metadata does not specify them."""

    shape: float
    colour: float
    count: float
    position: float | None
    size: float | None

    @property
    def strict(self) -> float:
        """1.0 if the image shows exactly the requested objects, otherwise 0.0."""
        return float(self.graded == 1.0)

    @property
    def graded(self) -> float:
        """Mean of the grades that are not None, 0 to 1."""
        parts = [p for p in (self.shape, self.colour, self.count, self.position, self.size) if p is not None]
        return sum(parts) / len(parts)


def verify(image: npt.NDArray[np.float32], metadata: Mapping[str, Any]) -> Verdict:
    """Grade one image, [3, H, W] in [0, 1], against GenEval-style metadata.

    Raises:
        PromptError: the metadata does not describe a scene of the shapes world.
    """
    check_metadata(metadata)
    include = metadata["include"]
    expected = [(item["color"], item["class"]) for item in include for _ in range(item["count"])]
    objects = _objects_in(np.asarray(image, np.float32).tobytes(), image.shape)
    shapes = _agreement([o.shape for o in objects], [s for _, s in expected])
    colours = _agreement([o.colour for o in objects], [c for c, _ in expected])
    pairs = _agreement([(o.colour, o.shape) for o in objects], expected)
    # If all shapes and all colours match, but in the wrong pairs, the image is still wrong.
    colours = min(colours, pairs) if shapes == colours == 1.0 else colours
    return Verdict(
        shape=shapes,
        colour=colours,
        count=1 / (1 + abs(len(objects) - len(expected))),
        position=_position(objects, include),
        size=_size(objects, include),
    )


@lru_cache(maxsize=256)
def _objects_in(pixels: bytes, shape: tuple[int, ...]) -> list[DetectedObject]:
    """Objects in an image, remembered because the strict and the graded reward score the same images."""
    return find_objects(np.frombuffer(pixels, np.float32).reshape(shape))


def _agreement(detected: Sequence[Any], expected: Sequence[Any]) -> float:
    overlap = sum((Counter(detected) & Counter(expected)).values())
    return overlap / max(len(detected), len(expected))


def _position(objects: Sequence[DetectedObject], include: Sequence[Mapping[str, Any]]) -> float | None:
    related = [item for item in include if "position" in item]
    if not related:
        return None
    return float(all(_relation_holds(objects, item, include[item["position"][1]]) for item in related))


def _relation_holds(objects: Sequence[DetectedObject], item: Mapping[str, Any], anchor: Mapping[str, Any]) -> bool:
    def matching(requirement: Mapping[str, Any]) -> list[DetectedObject]:
        return [o for o in objects if (o.colour, o.shape) == (requirement["color"], requirement["class"])]

    relation = item["position"][0]
    for a in matching(item):
        for b in matching(anchor):
            dx, dy = a.x - b.x, a.y - b.y
            along, across = (dx, dy) if relation in ("left of", "right of") else (dy, dx)
            along = -along if relation in ("left of", "above") else along
            if along > abs(across):
                return True
    return False


def _size(objects: Sequence[DetectedObject], include: Sequence[Mapping[str, Any]]) -> float | None:
    sized = [item for item in include if "size" in item]
    if not sized:
        return None
    right = [
        any(
            (o.colour, o.shape) == (item["color"], item["class"])
            and (o.side < SMALL_BELOW) == (item["size"] == "small")
            for o in objects
        )
        for item in sized
    ]
    return sum(right) / len(right)


def verify_batch(images: torch.Tensor, metadata: Sequence[Mapping[str, Any]]) -> list[Verdict]:
    """Grade images [N, 3, H, W] in [0, 1], each against its own metadata."""
    pixels = images.detach().float().cpu().numpy()
    return [verify(image, item) for image, item in zip(pixels, metadata, strict=True)]


@checks_prompts(lambda text, metadata: check_metadata(metadata))
def verifier_reward(
    images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
) -> torch.Tensor:
    """Reward "verifier": 1 if the image shows exactly the objects in its metadata, otherwise 0."""
    return torch.tensor([verdict.strict for verdict in verify_batch(images, metadata)])


@checks_prompts(lambda text, metadata: check_metadata(metadata))
def verifier_graded_reward(
    images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
) -> torch.Tensor:
    """Reward "verifier_graded": mean grade of an image against its metadata, 0 to 1."""
    return torch.tensor([verdict.graded for verdict in verify_batch(images, metadata)])
