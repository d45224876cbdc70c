"""Rows that a device computes together: as they come on a CPU, of two sizes on a GPU, which compiles for each."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from solrl_core.lanes import split


@dataclass(frozen=True)
class Batch:
    """Rows of one batch.

    Attributes:
        places: which; the last may be repeated, to fill a size that was compiled for.
        count: how many of them are asked for, the first ones.
    """

    places: Sequence[int]
    count: int


def batches(count: int, limit: int, device: torch.device) -> list[Batch]:
    """Cut `count` rows into batches of at most `limit`, on a CPU for its lanes.

    On a GPU they are of `limit` rows, or of a quarter of it where that makes fewer of what is left.
    """
    if device.type == "cpu":
        return [Batch(range(rows.start, rows.stop), rows.stop - rows.start) for rows in split(count, limit, device)]
    whole, quarter = sizes(limit)
    cut = []
    start = 0
    while start < count:
        size = whole if count - start > whole - quarter else quarter
        rows = range(start, min(start + size, count))
        cut.append(Batch([*rows, *[rows[-1]] * (size - len(rows))], len(rows)))
        start += size
    return cut


def sizes(limit: int) -> tuple[int, int]:
    """What a GPU's batches hold: few sizes, because blocks are compiled for each."""
    return limit, max(1, limit // 4)
