"""Selection of the best and worst candidates of a group, and when two rewards count as equal. Only seeds travel on."""

import math
from collections.abc import Iterable, Sequence

ROUNDING = 2e-5
"""Rewards are equal up to rounding if they differ by at most this share of the largest magnitude among them.

One image in batches of 1 to 64 gave cosines of CLIP that differed by at most 8e-7 in float32 and 3e-8 in bfloat16
(ViT-L/14 and ViT-H/14 with random weights, and two miniatures, on an H100), which is 4e-6 of a cosine of 0.2; on a CPU,
the miniatures' rewards by 1.3e-6 of their magnitude. Rewards of a prompt's different images differ by percents.
"""


def rounding(rewards: Iterable[float]) -> float:
    """Difference up to which rewards are equal up to rounding, see `ROUNDING`."""
    return ROUNDING * max(map(abs, rewards), default=0.0)


def levelled(rewards: Sequence[float], tolerance: float) -> list[float]:
    """The rewards of a group, each replaced by the largest that is at most `tolerance` above it.

    From the largest down: rewards that are equal up to rounding are equal then, and rewards further apart differ.
    """
    found, top = list(rewards), math.inf
    for place in sorted(range(len(found)), key=found.__getitem__, reverse=True):
        if top - found[place] > tolerance:
            top = found[place]
        found[place] = top
    return found


def best_worst(rewards: Iterable[float], count: int) -> list[int]:
    """Indices of the ⌊count/2⌋ best and the remaining worst, best half first, best to worst.

    Ties go to the lower index, so that a selection can be repeated.

    Args:
        rewards: one finite score for each candidate of a group, perhaps as a tensor.
        count: number of candidates to select, 2 ≤ count ≤ number of rewards.

    Raises:
        ValueError: count out of range, or a reward that is not finite.
    """
    values = [float(reward) for reward in rewards]
    if not 2 <= count <= len(values):
        raise ValueError(f"got count {count} of {len(values)} candidates; expected 2 to {len(values)}")
    for at, value in enumerate(values):
        if not math.isfinite(value):
            raise ValueError(f"got reward {value} for candidate {at}; expected finite rewards")
    order = sorted(range(len(values)), key=values.__getitem__, reverse=True)
    best = count // 2
    return [*order[:best], *order[len(order) - (count - best) :]]
