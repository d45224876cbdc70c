"""Scenes and clips of the shapes world, drawn from metadata, and metadata that differ in one thing."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from solrl_core.rewards.geneval_rules import RELATIONS
from solrl_minis.motion_verifier import DIRECTIONS, LEAST_PIXELS, QUICK_PIXELS, SPEEDS
from solrl_minis.scenes import PALETTE, SIDE, SIZE_RADII, signed_distance
from solrl_minis.world import COLOURS, SHAPES, SIZES

RADII = {"single_object": (7, 12), "two_object": (7, 11), "counting": (6, 8.5), "position": (7, 10), **SIZE_RADII}
WAYS = {"slowly": (LEAST_PIXELS + 2, QUICK_PIXELS - 3), "quickly": (QUICK_PIXELS + 3, 30), None: (LEAST_PIXELS + 2, 30)}
MARGIN = 3
"""Least pixels between two objects, and between an object and the border."""
FRAMES = 9


def held_out(folder: Path, each: int) -> list[dict[str, Any]]:
    """Metadata of held-out prompts of a folder, the first of each tag."""
    rows = [json.loads(line) for line in (folder / "test_metadata.jsonl").read_text().splitlines()]
    tagged = [[row for row in rows if row["tag"] == tag][:each] for tag in dict.fromkeys(row["tag"] for row in rows)]
    return [{"tag": row["tag"], "include": row["include"]} for same in zip(*tagged, strict=True) for row in same]


def changes(metadata: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All metadata that differ in one value, and name no object twice."""
    include = metadata["include"]
    values = {"color": COLOURS, "class": SHAPES, "size": SIZES, "motion": DIRECTIONS, "speed": SPEEDS}
    counts = {"count": range(1, 5)} if metadata["tag"] in ("single_object", "counting") else {}
    for at, item in enumerate(include):
        others = [item | {name: value} for name in item for value in (values | counts).get(name, ())]
        others += [item | {"position": [relation, 0]} for relation in RELATIONS if "position" in item]
        names = [(other["color"], other["class"]) for other in include if other is not item]
        for other in others:
            if other != item and (other["color"], other["class"]) not in names:
                yield metadata | {"include": [*include[:at], other, *include[at + 1 :]]}


def scene(*objects: tuple[str, str, float, float, float], seed: int = 0) -> torch.Tensor:
    """An image of (colour, shape, x, y, radius) objects, in slightly varied colours on a light background."""
    random = torch.Generator().manual_seed(seed)
    ground = 0.86 + 0.12 * torch.rand(1, generator=random) + 0.015 * torch.randn(3, generator=random)
    image = ground.clamp(0, 1)[:, None, None].repeat(1, SIDE, SIDE)
    axis = torch.arange(SIDE) + 0.5
    for colour, shape, x, y, radius in objects:
        ink = (PALETTE[COLOURS.index(colour)] + 0.03 * torch.randn(3, generator=random)).clamp(0, 1)
        dy, dx = torch.meshgrid(axis - y, axis - x, indexing="ij")
        distance = signed_distance(dx, dy, torch.tensor(radius), torch.tensor(SHAPES.index(shape)))
        image += (0.5 - distance).clamp(0, 1) * (ink[:, None, None] - image)
    return image


def drawn_scene(metadata: dict[str, Any], seed: int) -> torch.Tensor:
    """A scene as the metadata say, its objects apart from each other at random places."""
    random, include = np.random.default_rng(seed), metadata["include"]
    things = [(item["color"], item["class"]) for item in include for _ in range(item["count"])]
    relation, apart = include[-1].get("position", [None])[0], ~np.eye(len(things), dtype=bool)
    while True:
        radius = random.uniform(*RADII[include[0].get("size", metadata["tag"])], len(things))
        centre = random.uniform(radius + MARGIN, SIDE - radius - MARGIN, (2, len(things))).T
        gaps = np.abs(centre[:, None] - centre).max(-1) - radius[:, None] - radius
        dx, dy = centre[-1] - centre[0]
        along = {"left of": -dx, "right of": dx, "above": -dy, "below": dy, None: np.inf}[relation]
        if (gaps[apart] >= MARGIN).all() and along > min(abs(dx), abs(dy)) + 5:
            return scene(*((*thing, *at, r) for thing, at, r in zip(things, centre, radius, strict=True)), seed=seed)


def drawn_clip(metadata: dict[str, Any], seed: int) -> torch.Tensor:
    """A clip of objects that move as the metadata say; crossing ones each in a half of their own."""
    random, paths = np.random.default_rng(seed), []
    rows = random.permutation([SIDE / 4, 3 * SIDE / 4])
    for item, row in zip(metadata["include"], rows, strict=False):
        crossing = metadata["tag"] == "crossing"
        way = random.uniform(*WAYS["quickly" if crossing else item.get("speed")]) * np.array(DIRECTIONS[item["motion"]])
        radius = random.uniform(6, 9)
        reach = radius + MARGIN + np.abs(way) / 2
        middle = np.add((SIDE / 2, row), random.uniform(-3, 3, 2)) if crossing else random.uniform(reach, SIDE - reach)
        paths.append(((item["color"], item["class"]), middle - way / 2, way, radius))
    shares = np.linspace(0, 1, FRAMES)
    return torch.stack([scene(*((*o, *(at + t * way), r) for o, at, way, r in paths), seed=seed) for t in shares])
