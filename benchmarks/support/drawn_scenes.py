"""Scenes of given objects, by the renderer of the miniatures."""

import numpy as np
import numpy.typing as npt
from minis_recipe.scenes import Scenes, render
from solrl_minis.world import COLOURS, SHAPES


def scene(*objects: tuple[str, str, float, float, float]) -> npt.NDArray[np.float32]:
    """One image of (colour, shape, x, y, radius) objects."""
    place, shape, colour = np.zeros((1, 4, 3), np.float32), np.zeros((1, 4), np.int64), np.zeros((1, 4), np.int64)
    present = np.zeros((1, 4), bool)
    for j, (c, s, *where) in enumerate(objects):
        colour[0, j], shape[0, j], present[0, j] = COLOURS.index(c), SHAPES.index(s), True
        place[0, j] = where
    drawn: npt.NDArray[np.float32] = render(Scenes(shape, colour, place, present), 0)[0].numpy()
    return drawn
