"""Rows that a device computes together, filled up where a smaller batch would round or compile otherwise.

A GPU compiles for two sizes. A CPU's matrix products round otherwise below four rows, which flips codes of a quantised
value near a tie; filled up, a candidate's latents do not depend on what it is batched with.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from solrl_core.lanes import lane_count

FEWEST_ON_CPU = 4
"""From here on every batch size gives a candidate the same bits: measured on the miniatures (AVX-512)."""


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
    """Cut `count` rows into batches of at most `limit`.

    On a CPU they share its lanes, and none has fewer than `FEWEST_ON_CPU` rows where `limit` allows as many. On a GPU
    they are of `limit` rows, or of a quarter of it where that makes fewer of what is left.
    """
    if device.type == "cpu":
        fewest = min(FEWEST_ON_CPU, limit)
        number = max(math.ceil(count / limit), min(lane_count(), math.ceil(count / fewest)))
        size = math.ceil(count / number)
        return [_batch(start, min(start + size, count), fewest) for start in range(0, count, size)]
    whole, quarter = sizes(limit)
    cut = []
    start = 0
    while start < count:
        size = whole if count - start > whole - quarter else quarter
        cut.append(_batch(start, min(start + size, count), size))
        start += size
    return cut


def _batch(start: int, stop: int, fewest: int) -> Batch:
    """Rows `start` to `stop`, the last one repeated up to `fewest`."""
    rows = range(start, stop)
    return Batch([*rows, *[rows[-1]] * (fewest - len(rows))], len(rows))


def sizes(limit: int) -> tuple[int, int]:
    """What a GPU's batches hold: few sizes, because blocks are compiled for each."""
    return limit, max(1, limit // 4)
