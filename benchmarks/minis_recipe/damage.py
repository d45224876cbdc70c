"""Rendered scenes as a generator might spoil them: damaged objects, and images that are soft, noisy or off in tone.

The judge learns from them. Damage leaves an object without a shape or without a colour of the world; what is done to a
whole image changes nothing about its content.
"""

import math
from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.nn.functional as F
from solrl_minis.scenes import PALETTE, SIDE, signed_distance
from solrl_minis.world import COLOURS, SHAPES

from minis_recipe.scenes import MAX_OBJECTS, Scenes


class Damage(IntEnum):
    """Kinds of damage to an object. The last two cost it its colour, the others but NONE its shape."""

    NONE = 0
    BLENDED = 1
    CUT = 2
    STRETCHED = 3
    BENT = 4
    FAINT = 5
    MERGED = 6
    TWO_COLOURS = 7
    STRANGE_COLOUR = 8


_TRIANGLE = SHAPES.index("triangle")
_GRID = torch.linspace(0, 1, 9)
_ANY_COLOUR = torch.cartesian_prod(_GRID, _GRID, _GRID)
_GREYS = torch.linspace(0.8, 1, 5)[:, None].expand(-1, 3)
STRANGE_COLOURS = _ANY_COLOUR[torch.cdist(_ANY_COLOUR, torch.cat([PALETTE, _GREYS])).amin(1) > 0.25]
"""RGB colours that are neither one of the world's nor a background."""


@dataclass(frozen=True)
class Marks:
    """Ground truth of N drawn scenes of up to 4 objects each, as in `Scenes`; the index after the last means none.

    Attributes:
        shape, colour: [N, 4] index into `world.SHAPES` and `world.COLOURS`.
        place: [N, 4, 3] centre x, centre y and radius, in pixels.
        present: [N, 4] whether the slot holds an object.
    """

    shape: torch.Tensor
    colour: torch.Tensor
    place: torch.Tensor
    present: torch.Tensor


def draw(scenes: Scenes, damage: torch.Tensor) -> tuple[torch.Tensor, Marks]:
    """Draw scenes with varied tones, each object with its kind of `damage` [N, 4].

    Returns:
        Images [N, 3, 64, 64] in [0, 1], and what they show.
    """
    n = len(damage)
    shape, colour = torch.from_numpy(scenes.shape), torch.from_numpy(scenes.colour)
    place, present = torch.from_numpy(scenes.place), torch.from_numpy(scenes.present)
    ink = (PALETTE[colour] + 0.03 * torch.randn(n, MAX_OBJECTS, 3)).clamp(0, 1)
    strange = STRANGE_COLOURS[torch.randint(len(STRANGE_COLOURS), (n, MAX_OBJECTS))]
    ink = torch.where((damage == Damage.STRANGE_COLOUR)[..., None], strange, ink)
    image = (0.86 + 0.13 * torch.rand(n, 1) + 0.015 * torch.randn(n, 3)).clamp(0, 1)
    image = image[:, :, None, None].expand(n, 3, SIDE, SIDE).clone()
    for j in range(MAX_OBJECTS):
        cover, second = _object(shape[:, j], place[:, j], damage[:, j])
        other = PALETTE[(colour[:, j] + torch.randint(1, len(COLOURS), (n,))) % len(COLOURS)]
        paint = ink[:, j, :, None, None].expand_as(image)
        paint = torch.where(second[:, None], other[:, :, None, None], paint)
        image += (cover * present[:, j, None, None])[:, None] * (paint - image)
    shapeless = (damage != Damage.NONE) & (damage < Damage.TWO_COLOURS)
    colourless = damage >= Damage.TWO_COLOURS
    return image, Marks(
        shape.masked_fill(shapeless, len(SHAPES)), colour.masked_fill(colourless, len(COLOURS)), place, present
    )


def _object(shape: torch.Tensor, place: torch.Tensor, damage: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cover [N, 64, 64] of one object of each scene, and the part of it that has a second colour."""
    n, radius = len(shape), place[:, 2, None, None]

    def of(kind: Damage) -> torch.Tensor:
        return (damage == kind)[:, None, None]

    def between(low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(n, 1, 1)

    bend = radius * torch.where(of(Damage.BENT), between(0.3, 0.5), between(0, 0.06))
    wave = F.interpolate(torch.randn(n, 2, 7, 7), SIDE, mode="bicubic", align_corners=True)
    axis = torch.arange(SIDE) + 0.5
    dx = axis[None, None, :] - place[:, 0, None, None] + bend * wave[:, 0]
    dy = axis[None, :, None] - place[:, 1, None, None] + bend * wave[:, 1]
    long = torch.where(of(Damage.STRETCHED), between(1.6, 2.2), between(0.95, 1.08))
    upright = torch.rand(n, 1, 1) < 0.5
    x, y = torch.where(upright, dx, dx / long), torch.where(upright, dy / long, dy)

    distance = signed_distance(x, y, radius, shape[:, None, None])
    another = (shape + torch.randint(1, len(SHAPES), (n,))) % len(SHAPES)
    blended = distance.lerp(signed_distance(x, y, radius, another[:, None, None]), between(0.4, 0.6))
    distance = torch.where(of(Damage.BLENDED), blended, distance)

    angle = 2 * math.pi * torch.rand(n, 1, 1)
    # A triangle is cut at its top: what is left above another cut is a triangle.
    angle = torch.where((shape == _TRIANGLE)[:, None, None], -math.pi / 2 + between(-0.4, 0.4), angle)
    across = dx * angle.cos() + dy * angle.sin()
    cut = torch.maximum(distance, across - between(-0.25, 0.25) * radius)
    distance = torch.where(of(Damage.CUT), cut, distance)

    away = between(0.7, 1.1) * radius
    beside = signed_distance(dx - away * angle.cos(), dy - away * angle.sin(), radius, another[:, None, None])
    distance = torch.where(of(Damage.MERGED), torch.minimum(distance, beside), distance)

    opacity = torch.where(of(Damage.FAINT), between(0.25, 0.5), between(0.85, 1))
    return (0.5 - distance).clamp(0, 1) * opacity, of(Damage.TWO_COLOURS) & (across > between(-0.3, 0.3) * radius)


def spoil(images: torch.Tensor) -> torch.Tensor:
    """Change the tone of images, soften half of them, compress half of them, and add noise to half of them."""
    n = len(images)

    def half(high: float) -> torch.Tensor:
        return high * (torch.rand(n, 1, 1, 1) * 2 - 1).clamp(min=0)

    images = images * (1 + 0.08 * torch.randn(n, 1, 1, 1)) + 0.03 * torch.randn(n, 3, 1, 1)
    soft = F.avg_pool2d(F.pad(images, (1, 1, 1, 1), mode="replicate"), 3, 1)
    softer = F.avg_pool2d(F.pad(soft, (1, 1, 1, 1), mode="replicate"), 3, 1)
    images = images.lerp(torch.where(torch.rand(n, 1, 1, 1) < 0.5, soft, softer), half(1.0))
    images = _compressed(images, half(0.15))
    blotches = F.interpolate(torch.randn(n, 3, 16, 16), SIDE, mode="bicubic", align_corners=False)
    return (images + half(0.06) * torch.randn_like(images) + half(0.05) * blotches).clamp(0, 1)


def _compressed(images: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    """Round the cosine transform of blocks of 8 × 8 pixels, as JPEG does: coarser for higher frequencies."""
    k = torch.arange(8.0)
    cosines = torch.cos(math.pi / 8 * (k + 0.5) * k[:, None]) / 2
    cosines[0] /= 2**0.5
    count, channels, height, width = images.shape
    blocks = images.reshape(count, channels, height // 8, 8, width // 8, 8).transpose(3, 4)
    steps = step[..., None, None] * (1 + (k + k[:, None]) / 2) + 1e-6
    rounded = ((cosines @ blocks @ cosines.T) / steps).round() * steps
    return (cosines.T @ rounded @ cosines).transpose(3, 4).flatten(4, 5).flatten(2, 3)
