"""Training of the judge's detector, on rendered scenes and their ground truth alone.

Neither verifier nor reward nor generator has a part in it. Scenes of held-out combinations are left out, to test on.
"""

import itertools

import numpy as np
import torch
import torch.nn.functional as F
from solrl_core.rewards import Reward
from solrl_minis.judge import CELL, Detector
from solrl_minis.scenes import SIDE
from solrl_minis.world import COLOURS, SHAPES

from minis_recipe.damage import Damage, Marks, draw, spoil
from minis_recipe.data import Source
from minis_recipe.loop import Budget, Rates, fit
from minis_recipe.scenes import MAX_OBJECTS
from minis_recipe.world import Combination

RATES = Rates(3e-3, weight_decay=0.02, average=0.99)
DAMAGED = 0.2
"""Share of damaged objects."""
MIXED = 0.3
"""Share of scenes of three or four different objects. No prompt describes one, but some generated images show one."""

_CELLS = SIDE // CELL
_OBJECTS = list(itertools.product(COLOURS, SHAPES))


def train(detector: Detector, budget: Budget, device: str) -> list[float]:
    """Train in place; returns the loss at each step."""
    detector.to(device).train()
    source = Source(6)

    def value() -> tuple[torch.Tensor, torch.Tensor]:
        images, marks = examples(source, budget.batch)
        batch_loss = loss(detector(spoil(images).to(device)), targets(marks, device))
        return batch_loss, batch_loss

    losses = fit("judge", list(detector.parameters()), value, budget, RATES)
    detector.eval()
    return losses


def examples(source: Source, count: int) -> tuple[torch.Tensor, Marks]:
    """Draw scenes of training combinations and mixed ones, some of their objects damaged."""
    mixed = int(source.rng.binomial(count, MIXED))
    scenes = source.scenes(source.draw(count - mixed) + [_mixed(source.rng) for _ in range(mixed)])
    damaged = torch.rand(count, MAX_OBJECTS) < DAMAGED
    return draw(scenes, damaged * torch.randint(1, len(Damage), damaged.shape))


def _mixed(rng: np.random.Generator) -> Combination:
    """Three or four objects of different colours or shapes, which is no combination of the world."""
    picks = rng.choice(len(_OBJECTS), size=int(rng.integers(3, MAX_OBJECTS + 1)), replace=False)
    return Combination("counting", tuple(_OBJECTS[pick] for pick in picks))


def targets(marks: Marks, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Targets of the detector in each cell, [N, 16, 16] or [N, 2, 16, 16], of the nearest object.

    `object` is 1 in the cell nearest to an object's centre, and falls off with the distance in cells.
    """
    centre = marks.place[..., :2] / CELL - 0.5
    cell = torch.arange(_CELLS, dtype=torch.float32)
    dx = centre[..., 0, None, None] - cell
    dy = centre[..., 1, None, None] - cell[:, None]
    distance = (dx**2 + dy**2).masked_fill(~marks.present[..., None, None], torch.inf)
    nearest = distance.amin((2, 3), keepdim=True)
    there, slot = torch.exp(nearest.nan_to_num(posinf=0.0) - distance).max(1)

    def of_slot(values: torch.Tensor) -> torch.Tensor:
        return values.expand(-1, -1, _CELLS, _CELLS).gather(1, slot[:, None])[:, 0]

    found = {
        "object": there,
        "shape": of_slot(marks.shape[..., None, None]),
        "colour": of_slot(marks.colour[..., None, None]),
        "offset": torch.stack([of_slot(dx), of_slot(dy)], 1),
        "side": of_slot((2 * marks.place[..., 2] / CELL).clamp(min=1e-3).log()[..., None, None]),
    }
    return {name: value.to(device) for name, value in found.items()}


def loss(maps: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> torch.Tensor:
    """Cross-entropy of objects, shapes and colours plus the errors of place and side, per object.

    Side and place count for whole objects alone: what a damaged one measures is not defined.
    """
    there = wanted["object"]
    near = there * (there > 0.5)
    whole = near * (wanted["shape"] < len(SHAPES))
    objects = F.binary_cross_entropy_with_logits(maps["object"][:, 0], there, reduction="sum")
    names = sum(near * F.cross_entropy(maps[name], wanted[name], reduction="none") for name in ("shape", "colour"))
    measures = F.smooth_l1_loss(maps["offset"], wanted["offset"], reduction="none", beta=0.1).sum(1)
    measures = measures + F.smooth_l1_loss(maps["side"][:, 0], wanted["side"], reduction="none", beta=0.1)
    count = (there == 1).sum().clamp(min=1)
    total: torch.Tensor = (objects + (names + whole * measures).sum()) / count
    return total


def accepted(reward: Reward, count: int = 500) -> dict[str, float]:
    """Share of held-out scenes that a reward of 0 or 1 accepts as their prompt's image: right ones, and wrong ones."""
    source = Source(9, held_out=True)
    combinations = source.draw(count)
    torch.manual_seed(9)  # for drawing and spoiling
    intact, one_damaged = torch.zeros(2, count, MAX_OBJECTS, dtype=torch.long)
    one_damaged[:, 0] = torch.randint(1, len(Damage), (count,))
    right, _ = draw(source.scenes(combinations), intact)
    changed, _ = draw(source.scenes([source.change(c) for c in combinations]), intact)
    damaged, _ = draw(source.scenes(combinations), one_damaged)
    kinds = {
        "right": right,
        "right, spoiled": spoil(right),
        "one attribute changed": changed,
        "one object damaged": damaged,
    }
    metadata = [c.metadata for c in combinations]
    return {kind: float(reward(images, [""] * count, metadata).mean()) for kind, images in kinds.items()}
