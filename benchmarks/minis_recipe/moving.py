"""The moving shapes world: clips, with captions, of objects that move in a direction, at a speed, or cross."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from solrl_minis.catalog import moving
from solrl_minis.motion_verifier import DIRECTIONS, LEAST_PIXELS, QUICK_PIXELS, SPEEDS
from solrl_minis.scenes import SIDE
from solrl_minis.world import COLOURS, SHAPES
from solrl_proto.text_files import read_lines

from minis_recipe.data import ListedWorld
from minis_recipe.scenes import MARGIN, MAX_OBJECTS, Scenes, render
from minis_recipe.world import is_held_out

FRAMES = 9
KINDS = ("direction", "speed", "crossing")
RADII = (6.0, 9.0)
SLOW, QUICK = (LEAST_PIXELS + 2, QUICK_PIXELS - 3), (QUICK_PIXELS + 3, 30.0)
"""Pixels from the first to the last frame, apart from the verifier's limits."""
_OPPOSITE = {"left": "right", "right": "left"}
_WORDS = {"left": "to the left", "right": "to the right", "up": "up", "down": "down"}
_TEMPLATES = {
    "direction": ("a {a} moves {way}", "a {a} that moves {way}", "there is a {a} and it moves {way}"),
    "speed": ("a {a} moves {speed} {way}", "a {a} that moves {speed} {way}"),
    "crossing": ("a {a} moves {way} past a {b}", "a {a} passes a {b} and moves {way}"),
}


@dataclass(frozen=True)
class Movement:
    """Content of a prompt, independent of its wording: `direction` and `speed` are the first thing's.

    In a crossing, the second thing moves in the opposite direction.
    """

    kind: str
    things: tuple[tuple[str, str], ...]
    direction: str
    speed: str | None = None

    @property
    def held_out(self) -> bool:
        """Whether the movement is held out: nothing in this project trains on it."""
        return is_held_out(f"{self.kind} {self.things} {self.direction} {self.speed}")

    @property
    def metadata(self) -> dict[str, Any]:
        """Metadata of the movement for its verifier."""
        include = [{"class": shape, "count": 1, "color": colour} for colour, shape in self.things]
        for item, direction in zip(include, (self.direction, _OPPOSITE.get(self.direction)), strict=False):
            item |= {"motion": direction} | ({"speed": self.speed} if self.speed else {})
        return {"tag": self.kind, "include": include}

    def phrasings(self) -> list[str]:
        """All wordings of this movement."""
        names = [f"{colour} {shape}" for colour, shape in self.things]
        words = {"a": names[0], "b": names[-1], "way": _WORDS[self.direction], "speed": self.speed}
        return [template.format(**words) for template in _TEMPLATES[self.kind]]


def all_movements() -> list[Movement]:
    """All movements of the world."""
    things = list(itertools.product(COLOURS, SHAPES))
    single = [(thing, direction) for thing in things for direction in DIRECTIONS]
    return [
        *(Movement("direction", (thing,), direction) for thing, direction in single),
        *(Movement("speed", (thing,), direction, speed) for thing, direction in single for speed in SPEEDS),
        *(Movement("crossing", pair, way) for pair in itertools.permutations(things, 2) for way in _OPPOSITE),
    ]


def differing_in_one(movement: Movement) -> list[Movement]:
    """Movements that differ from this one in direction, in speed, or in the colour or shape of a thing."""
    others = [replace(movement, direction=one) for one in (_OPPOSITE if len(movement.things) > 1 else DIRECTIONS)]
    others += [replace(movement, speed=one) for one in SPEEDS if movement.speed]
    for place, (colour, shape) in enumerate(movement.things):
        for thing in [*((one, shape) for one in COLOURS), *((colour, one) for one in SHAPES)]:
            if thing not in movement.things:
                others.append(
                    replace(movement, things=(*movement.things[:place], thing, *movement.things[place + 1 :]))
                )
    return [other for other in others if other != movement]


def sample_movements(held_out: bool, count: int, seed: int) -> list[dict[str, Any]]:
    """Sample `count` distinct prompts of one split with their metadata."""
    source = MovingSource(seed, held_out)
    prompts: dict[str, dict[str, Any]] = {}
    while len(prompts) < count:
        (movement,) = source.draw(1)
        text = source.caption(movement)
        prompts.setdefault(text, {"prompt": text, **movement.metadata})
    return list(prompts.values())


def held_out(count: int | None = None) -> list[dict[str, Any]]:
    """The first `count` shipped held-out prompts with their metadata; all if None."""
    return [json.loads(line) for line in read_lines(moving() / "test_metadata.jsonl")[:count]]


class MovingSource(ListedWorld):
    """Movements, as clips."""

    def __init__(self, seed: int, held_out: bool = False) -> None:
        movements = [movement for movement in all_movements() if movement.held_out == held_out]
        kinds = {kind: [one for one in movements if one.kind == kind] for kind in KINDS}
        super().__init__(seed, held_out, kinds, differing_in_one)

    def images(self, contents: Sequence[Movement], device: str) -> torch.Tensor:
        """Render one clip per movement, [N, 9, 3, 64, 64] in [0, 1]."""
        scenes, ways = self._place(contents)
        seed, parts = int(self.rng.integers(2**31)), []
        for share in np.linspace(0, 1, FRAMES):
            place = scenes.place.copy()
            place[..., :2] += np.float32(share) * ways
            parts.append(render(replace(scenes, place=place), seed, device))
        return torch.stack(parts, 1)

    def _place(self, movements: Sequence[Movement]) -> tuple[Scenes, np.ndarray[Any, Any]]:
        """Objects in the first frame, and their ways to the last one, [N, 4, 2] in pixels."""
        count, rng = len(movements), self.rng
        shape, colour = np.zeros((2, count, MAX_OBJECTS), np.int64)
        present = np.zeros((count, MAX_OBJECTS), bool)
        place, ways = np.zeros((count, MAX_OBJECTS, 3), np.float32), np.zeros((count, MAX_OBJECTS, 2), np.float32)
        for i, movement in enumerate(movements):
            rows = rng.permutation([SIDE / 4, 3 * SIDE / 4])
            for j, (c, s) in enumerate(movement.things):
                shape[i, j], colour[i, j], present[i, j] = SHAPES.index(s), COLOURS.index(c), True
                bounds = {"slowly": SLOW, "quickly": QUICK}.get(movement.speed or "", (SLOW[0], QUICK[1]))
                pixels = rng.uniform(*(QUICK if movement.kind == "crossing" else bounds))
                way = pixels * np.array(DIRECTIONS[movement.direction]) * (-1 if j else 1)
                radius = rng.uniform(*RADII)
                reach = radius + MARGIN + np.abs(way) / 2
                middle = rng.uniform(reach, SIDE - reach)
                if movement.kind == "crossing":
                    # On lines of their own, both half of the way at about the same time.
                    middle = np.array([SIDE / 2 + rng.uniform(-4, 4), rows[j] + rng.uniform(-3, 3)])
                place[i, j], ways[i, j] = (*(middle - way / 2), radius), way
        return Scenes(shape, colour, place, present), ways
