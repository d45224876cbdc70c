"""Training data: rendered scenes with captions, and codes to test whether a caption is true of a scene."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from solrl_minis.scenes import Scenes, render, sample_scenes
from solrl_minis.verifier import SMALL_BELOW, DetectedObject
from solrl_minis.world import COLOURS, KINDS, RELATIONS, SHAPES, SIZES, Combination, differing_in_one, split


class Source:
    """Draws combinations, all kinds equally often, and variants of them with one attribute changed.

    A source of training combinations never draws a held-out variant either.
    """

    def __init__(self, seed: int, held_out: bool = False) -> None:
        self.rng = np.random.default_rng(seed)
        self._kinds = split(held_out)
        self._changes: dict[Combination, list[Combination]] = {}
        self._held_out = held_out

    def draw(self, count: int) -> list[Combination]:
        """Draw `count` combinations."""
        kinds = self.rng.integers(len(KINDS), size=count)
        picks = self.rng.random(count)
        groups = [self._kinds[kind] for kind in KINDS]
        return [groups[k][int(p * len(groups[k]))] for k, p in zip(kinds, picks, strict=True)]

    def change(self, combination: Combination) -> Combination:
        """Draw a combination that differs in one attribute."""
        if combination not in self._changes:
            self._changes[combination] = [c for c in differing_in_one(combination) if self._held_out or not c.held_out]
        options = self._changes[combination]
        return options[int(self.rng.random() * len(options))]

    def caption(self, combination: Combination) -> str:
        """Draw one of the combination's wordings."""
        texts = combination.phrasings()
        return texts[int(self.rng.random() * len(texts))]

    def scenes(self, combinations: Sequence[Combination]) -> Scenes:
        """Place the objects of each combination."""
        return sample_scenes(combinations, self.rng)

    def images(self, combinations: Sequence[Combination], device: str) -> torch.Tensor:
        """Render one image per combination, [N, 3, 64, 64] in [0, 1]."""
        return render(self.scenes(combinations), int(self.rng.integers(2**31)), device)


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
