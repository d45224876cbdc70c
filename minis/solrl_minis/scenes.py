"""Scenes of the shapes world: their size, and the colours, sizes and outlines of objects."""

import torch

SIDE = 64

PALETTE = torch.tensor(
    [
        [0.86, 0.12, 0.15],
        [0.12, 0.62, 0.20],
        [0.12, 0.25, 0.85],
        [0.95, 0.80, 0.10],
        [0.62, 0.18, 0.72],
        [0.10, 0.75, 0.82],
    ]
)
"""RGB of each colour, in the order of `world.COLOURS`."""
SIZE_RADII = {"small": (5.5, 7.5), "large": (11.0, 14.0)}
"""Range of the radius in pixels of each size, where a prompt names one."""


def signed_distance(dx: torch.Tensor, dy: torch.Tensor, radius: torch.Tensor, shape: torch.Tensor) -> torch.Tensor:
    """Signed distance in pixels to a shape's outline; every shape spans a box of side 2·radius."""
    ax, ay = dx.abs(), dy.abs()
    circle = (dx**2 + dy**2).sqrt() - radius
    square = torch.maximum(ax, ay) - radius
    triangle = torch.maximum((2 * ax - dy - radius) / 5**0.5, dy - radius)
    bar = 0.36 * radius
    cross = torch.minimum(
        torch.maximum(ax - radius, ay - bar),
        torch.maximum(ax - bar, ay - radius),
    )
    return torch.stack([circle, square, triangle, cross]).gather(0, shape.expand_as(dx)[None])[0]
