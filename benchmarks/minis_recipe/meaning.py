"""Codes of the content of captions, scenes and images, to test whether a caption is true of an image."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from solrl_minis.verifier import SMALL_BELOW, DetectedObject
from solrl_minis.world import COLOURS, SHAPES

from minis_recipe.scenes import Scenes
from minis_recipe.world import RELATIONS, SIZES, Combination


@dataclass(frozen=True)
class Meaning:
    """Content of texts or scenes as comparable codes for objects, relation and size; -1 means unspecified."""

    objects: torch.Tensor
    relation: torch.Tensor
    size: torch.Tensor

    def true_of(self, scenes: "Meaning") -> torch.Tensor:
        """[scenes, texts] bool: whether text j is true of scene i. The texts are `self`'s."""
        same = scenes.objects[:, None] == self.objects[None]
        relation = (self.relation[None] < 0) | (scenes.relation[:, None] == self.relation[None])
        size = (self.size[None] < 0) | (scenes.size[:, None] == self.size[None])
        return same & relation & size

    def rows(self, index: npt.NDArray[np.int64]) -> "Meaning":
        """Select rows."""
        return Meaning(self.objects[index], self.relation[index], self.size[index])

    def join(self, other: "Meaning") -> "Meaning":
        """Concatenate with the codes of another."""
        pairs = ((self.objects, other.objects), (self.relation, other.relation), (self.size, other.size))
        return Meaning(*(torch.cat(pair) for pair in pairs))

    def to(self, device: str) -> "Meaning":
        """Copy to another device."""
        return Meaning(self.objects.to(device), self.relation.to(device), self.size.to(device))


def _thing(colour: str, shape: str) -> int:
    return COLOURS.index(colour) * len(SHAPES) + SHAPES.index(shape)


def _relation_code(relation: str, swapped: bool) -> int:
    """Code of the position of the object with the higher thing index relative to the other."""
    index = RELATIONS.index(relation)
    return index ^ 1 if swapped else index


@cache
def _claim(combination: Combination) -> tuple[int, int, int]:
    relation = -1
    if combination.relation is not None:
        first, second = (_thing(*thing) for thing in combination.things)
        relation = _relation_code(combination.relation, swapped=second < first)
    size = -1 if combination.size is None else SIZES.index(combination.size)
    return _objects_code([_thing(*thing) for thing in combination.objects]), relation, size


def meaning_of_texts(combinations: Sequence[Combination]) -> Meaning:
    """Codes of the content that each combination's caption states."""
    codes = torch.tensor([_claim(combination) for combination in combinations])
    return Meaning(*codes.unbind(1))


def meaning_of_scenes(scenes: Scenes) -> Meaning:
    """Codes of the content of each scene, including relation and size that its combination leaves open."""
    codes = []
    for i in range(len(scenes.shape)):
        there = np.flatnonzero(scenes.present[i])
        things = (scenes.colour[i, there] * len(SHAPES) + scenes.shape[i, there]).tolist()
        x, y, half = scenes.place[i, there, :3].T.tolist()
        codes.append(_shown(things, list(zip(x, y, (2 * h for h in half), strict=True))))
    return Meaning(*torch.tensor(codes).unbind(1))


def meaning_of_detections(images: Sequence[Sequence[DetectedObject]]) -> Meaning:
    """Codes of the objects detected in each image; an object without a known shape matches no text."""
    codes = []
    for found in images:
        things = [_thing(one.colour, one.shape) for one in found if one.shape is not None]
        named = len(things) == len(found)
        codes.append(_shown(things, [(one.x, one.y, one.side) for one in found]) if named else (-2, -2, -2))
    return Meaning(*torch.tensor(codes).unbind(1))


def _shown(things: Sequence[int], places: Sequence[tuple[float, float, float]]) -> tuple[int, int, int]:
    """Codes of things at places (x, y, side), in pixels."""
    relation = size = -2
    if len(things) == 2 and things[0] != things[1]:
        low, high = np.argsort(things)
        dx, dy = (there - here for here, there in zip(places[low][:2], places[high][:2], strict=True))
        if abs(dx) != abs(dy):
            name = ("left of" if dx < 0 else "right of") if abs(dx) > abs(dy) else ("above" if dy < 0 else "below")
            relation = RELATIONS.index(name)
    if len(things) == 1:
        size = int(places[0][2] >= SMALL_BELOW)
    return _objects_code(things), relation, size


def _objects_code(things: Sequence[int]) -> int:
    code = 0
    for thing in sorted(things):
        code = code * 25 + thing + 1
    return code
