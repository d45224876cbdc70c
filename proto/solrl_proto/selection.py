"""Selection of the best and worst candidates of a group. Only their seeds travel on."""

import math
from collections.abc import Iterable


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
