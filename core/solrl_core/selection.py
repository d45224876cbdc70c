"""Selection of the best and worst candidates of a group. Only their seeds travel on."""

from collections.abc import Sequence

import torch


def best_worst(rewards: Sequence[float] | torch.Tensor, count: int) -> list[int]:
    """Indices of the ⌊count/2⌋ best and the remaining worst, best half first, best to worst.

    Ties go to the lower index, so that a selection can be repeated.

    Args:
        rewards: one finite score for each candidate of a group.
        count: number of candidates to select, 2 ≤ count ≤ len(rewards).

    Raises:
        ValueError: count out of range, or a reward that is not finite.
    """
    values = torch.as_tensor(rewards, dtype=torch.float64)
    if not 2 <= count <= len(values):
        raise ValueError(f"got count {count} of {len(values)} candidates; expected 2 to {len(values)}")
    if not torch.isfinite(values).all():
        at = int((~torch.isfinite(values)).nonzero()[0])
        raise ValueError(f"got reward {float(values[at])} for candidate {at}; expected finite rewards")
    order = torch.argsort(values, descending=True, stable=True).tolist()
    best = count // 2
    return [*order[:best], *order[len(order) - (count - best) :]]
