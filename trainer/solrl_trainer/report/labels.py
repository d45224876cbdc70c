"""Placement of labels in a matplotlib plot, so that they cover neither each other nor the plotted data."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

_POINT = 4.0
"""Half the side, in pixels, of a plotted point's square."""
_DISTANCES = (3, 8, 14, 22, 32, 44, 58)
"""Distances in pixels between a point and its label, in order of preference."""
_DIRECTIONS = 16
_LED_FROM = 14
"""From this distance on, a line connects the label and its point."""

Box = npt.NDArray[np.float64]
"""[4]: left, bottom, right, top in pixels."""


@dataclass(frozen=True)
class Label:
    """A text next to the point (x, y), with matplotlib's text properties."""

    x: float
    y: float
    text: str
    style: dict[str, Any]


def place_labels(axes: Any, labels: Sequence[Label]) -> list[Any]:
    """Add labels next to their points, away from other labels, lines, points and the legend if there is room.

    Call it last, because it fixes the position of the axes. Labels are placed in the given order.

    Returns:
        The annotations.
    """
    figure = axes.figure
    figure.canvas.draw()
    figure.set_layout_engine("none")
    taken = list(_drawn(axes))
    room = axes.get_window_extent()
    annotations = []
    for label in labels:
        at = axes.transData.transform((label.x, label.y))
        note = axes.annotate(
            label.text, (label.x, label.y), xytext=(0, 0), textcoords="offset pixels", ha="center", va="center"
        )
        note.set(**label.style)
        extent = note.get_window_extent()
        half = np.array([extent.width, extent.height]) / 2 + 1
        others = np.array(taken)
        best, least = (at, 0.0), math.inf
        for centre, distance in _places(at, half):
            box = np.concatenate([centre - half, centre + half])
            outside = box[0] < room.x0 or box[1] < room.y0 or box[2] > room.x1 or box[3] > room.y1
            cost = 1000 * outside + _overlaps(box, others) + distance / 100
            if cost < least:
                best, least = (centre, distance), cost
        centre, distance = best
        note.set_position(tuple(centre - at))
        if distance >= _LED_FROM:
            axes.annotate(
                "",
                (label.x, label.y),
                xytext=tuple(np.clip(at, centre - half, centre + half) - at),
                textcoords="offset pixels",
                arrowprops={"arrowstyle": "-", "color": "0.6", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 4},
            )
        # Wider than the text, so that another label does not seem to continue it.
        taken.extend([np.concatenate([centre - half - 2, centre + half + 2])] * 50)
        annotations.append(note)
    return annotations


def _places(at: npt.NDArray[np.float64], half: npt.NDArray[np.float64]) -> Iterator[tuple[Any, float]]:
    """Centres around a point at which a box of this half size keeps a distance, the nearest first."""
    for distance in _DISTANCES:
        for turn in range(_DIRECTIONS):
            # From the upper right, alternating between both sides.
            angle = math.pi / 4 + (-1) ** turn * math.ceil(turn / 2) * 2 * math.pi / _DIRECTIONS
            way = np.array([math.cos(angle), math.sin(angle)])
            yield at + way * (half + _POINT + distance), distance


def _overlaps(box: Box, others: npt.NDArray[np.float64]) -> int:
    if not len(others):
        return 0
    apart = (others[:, 2] <= box[0]) | (others[:, 0] >= box[2]) | (others[:, 3] <= box[1]) | (others[:, 1] >= box[3])
    return int((~apart).sum())


def _drawn(axes: Any) -> Iterator[Box]:
    """Boxes of the points and along the lines in the axes, and of the legend."""
    for line in axes.get_lines():
        points = line.get_transform().transform(line.get_xydata())
        if line.get_marker() not in ("", "None", None):
            for x, y in points:
                # A point weighs more than a crossed line.
                yield from [np.array([x - _POINT, y - _POINT, x + _POINT, y + _POINT])] * 20
        if line.get_linestyle() not in ("", "None", " "):
            for start, end in pairwise(points):
                count = max(2, int(math.hypot(*(end - start)) // 3))
                for part in np.linspace(start, end, count):
                    yield np.concatenate([part - 0.5, part + 0.5])
    legend = axes.get_legend()
    if legend is not None:
        extent = legend.get_window_extent()
        yield from [np.array([extent.x0, extent.y0, extent.x1, extent.y1])] * 50
