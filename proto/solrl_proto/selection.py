"""Selection of the best and worst candidates of a group, and when two rewards count as equal. Only seeds travel on."""

import math
from collections.abc import Iterable, Sequence

TIE_TOLERANCE = 5e-6
"""Two rewards of a group are equal up to rounding if they differ by at most this share of the larger magnitude.

One image in batches of 1 to 64 gave cosines of CLIP that differed by at most 8e-7 in float32 and 3e-8 in bfloat16
(ViT-L/14 and ViT-H/14 with random weights, and two miniatures, on an H100), which is 4e-6 of a cosine of 0.2; on a CPU,
the miniatures' rewards by 1.3e-6 of their magnitude. Rewards of a prompt's different images differ by percents.
"""
_SPREAD_TOLERANCE = 1e-3
"""Rewards that differ by more than this share of their group's spread are not equal, however far from 0 they are."""


def merge_ties(rewards: Sequence[float]) -> list[float]:
    """One reward's values in a group, each replaced by the largest that it equals up to rounding.

    From the largest down: values that are equal up to rounding become equal, other values stay apart. For example
    [1.0, 0.999999, 0.5] becomes [1.0, 1.0, 0.5]. Other groups, other rewards and outliers have no influence.
    """
    if not rewards:
        return []
    top, bottom = max(rewards), min(rewards)
    if top - bottom <= TIE_TOLERANCE * max(top, -bottom):
        return [top] * len(rewards)
    values, largest_gap = list(rewards), _SPREAD_TOLERANCE * (top - bottom)
    for place in sorted(range(len(values)), key=values.__getitem__, reverse=True):
        value = values[place]
        if top - value > min(largest_gap, TIE_TOLERANCE * max(abs(top), abs(value))):
            top = value
        values[place] = top
    return values


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
    for index, value in enumerate(values):
        if not math.isfinite(value):
            raise ValueError(f"got reward {value} for candidate {index}; expected finite rewards")
    order = sorted(range(len(values)), key=values.__getitem__, reverse=True)
    best = count // 2
    return [*order[:best], *order[len(order) - (count - best) :]]
