"""Scenes of the shapes world: placement and rendering of the objects of a combination."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from solrl_minis.scenes import PALETTE, SIDE, SIZE_RADII, signed_distance
from solrl_minis.world import COLOURS, SHAPES

from minis_recipe.world import Combination

MAX_OBJECTS = 4
MARGIN = 3.0
"""Minimum distance in pixels between two objects, and between an object and the border."""

_RADII = {
    "single_object": (7.0, 12.0),
    "two_object": (7.0, 11.0),
    "counting": (6.0, 8.5),
    "position": (7.0, 10.0),
    "size": (0.0, 0.0),
}


@dataclass(frozen=True)
class Scenes:
    """N scenes of up to 4 objects each.

    Attributes:
        shape: [N, 4] index into `world.SHAPES`.
        colour: [N, 4] index into `world.COLOURS`.
        place: [N, 4, 3] centre x, centre y and radius, in pixels.
        present: [N, 4] whether the slot holds an object.
    """

    shape: npt.NDArray[np.int64]
    colour: npt.NDArray[np.int64]
    place: npt.NDArray[np.float32]
    present: npt.NDArray[np.bool_]


def sample_scenes(combinations: Sequence[Combination], rng: np.random.Generator) -> Scenes:
    """Place the objects of each combination at random, so that none touch and their relation holds."""
    n = len(combinations)
    shape = np.zeros((n, MAX_OBJECTS), np.int64)
    colour = np.zeros((n, MAX_OBJECTS), np.int64)
    present = np.zeros((n, MAX_OBJECTS), bool)
    low, high = np.zeros(n), np.zeros(n)
    axis, sign = np.zeros(n, np.int64), np.zeros(n)
    for i, combination in enumerate(combinations):
        for j, (c, s) in enumerate(combination.objects):
            shape[i, j], colour[i, j], present[i, j] = SHAPES.index(s), COLOURS.index(c), True
        low[i], high[i] = SIZE_RADII[combination.size] if combination.size else _RADII[combination.kind]
        if combination.relation is not None:
            axis[i] = 0 if combination.relation in ("left of", "right of") else 1
            sign[i] = -1 if combination.relation in ("left of", "above") else 1

    place = np.zeros((n, MAX_OBJECTS, 3), np.float32)
    todo = np.arange(n)
    while len(todo):
        radius = rng.uniform(low[todo, None], high[todo, None], (len(todo), MAX_OBJECTS))
        reach = (radius + MARGIN)[..., None]
        centre = rng.uniform(reach, SIDE - reach, (len(todo), MAX_OBJECTS, 2))
        good = _separated(centre, radius, present[todo]) & _relation_holds(centre, axis[todo], sign[todo])
        place[todo[good], :, :2], place[todo[good], :, 2] = centre[good], radius[good]
        todo = todo[~good]
    return Scenes(shape, colour, place, present)


def _separated(
    centre: npt.NDArray[np.float64], radius: npt.NDArray[np.float64], present: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    gap = np.abs(centre[:, :, None] - centre[:, None]).max(-1) - radius[:, :, None] - radius[:, None]
    pair = present[:, :, None] & present[:, None] & ~np.eye(MAX_OBJECTS, dtype=bool)
    clear: npt.NDArray[np.bool_] = ~((gap < MARGIN) & pair).any((1, 2))
    return clear


def _relation_holds(
    centre: npt.NDArray[np.float64], axis: npt.NDArray[np.int64], sign: npt.NDArray[np.float64]
) -> npt.NDArray[np.bool_]:
    offset = centre[:, 1] - centre[:, 0]
    rows = np.arange(len(axis))
    along, across = offset[rows, axis] * sign, np.abs(offset[rows, 1 - axis])
    holds: npt.NDArray[np.bool_] = (sign == 0) | (along > across + 5)
    return holds


def render(scenes: Scenes, seed: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Draw scenes with anti-aliased edges, a light background and slightly varied colours.

    Returns:
        [N, 3, 64, 64] float32 in [0, 1].
    """
    generator = torch.Generator().manual_seed(seed)
    n = len(scenes.shape)
    grey = 0.86 + 0.12 * torch.rand(n, 1, generator=generator)
    background = (grey + 0.015 * torch.randn(n, 3, generator=generator)).clamp(0, 1)
    ink = PALETTE[torch.from_numpy(scenes.colour)]
    ink = (ink + 0.03 * torch.randn(ink.shape, generator=generator)).clamp(0, 1).to(device)
    place = torch.from_numpy(scenes.place).to(device)
    shape = torch.from_numpy(scenes.shape).to(device)
    present = torch.from_numpy(scenes.present).to(device)

    axis = torch.arange(SIDE, device=device) + 0.5
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    image = background.to(device)[:, :, None, None].expand(n, 3, SIDE, SIDE).clone()
    for j in range(MAX_OBJECTS):
        dx = x - place[:, j, 0, None, None]
        dy = y - place[:, j, 1, None, None]
        distance = signed_distance(dx, dy, place[:, j, 2, None, None], shape[:, j, None, None])
        cover = (0.5 - distance).clamp(0, 1) * present[:, j, None, None]
        image += cover[:, None] * (ink[:, j, :, None, None] - image)
    return image
