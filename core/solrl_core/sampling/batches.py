"""Padded batches: on a CPU so that results do not depend on the batch, on a GPU so that only two sizes are compiled.

A CPU's convolutions round differently from sixteen rows on, and some with one row. A difference in rounding flips the
codes of quantised values near a tie. With sizes between, padding, and `pad_to_min_rows` for matrix products, a
candidate's latents do not depend on the rest of its batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from solrl_core.sampling.cpu_threads import even_slices

CHUNK_SIZE = 24
"""Largest number of candidates in a batch of a service, and by default of a trainer."""
FEWEST_ON_CPU, MOST_ON_CPU = 4, 12
"""In batches of these sizes, and up to 15, a candidate's bits do not depend on the size: measured on the miniatures."""


@dataclass(frozen=True)
class PaddedBatch:
    """Rows that are computed together.

    Attributes:
        rows: indices of the rows; the last one may be repeated.
        count: number of rows without the repeated ones.
    """

    rows: Sequence[int]
    count: int


def padded_batches(count: int, limit: int, device: torch.device) -> list[PaddedBatch]:
    """Cut `count` rows into batches of at most `limit`.

    On a CPU there is at least one batch per thread, and each has `FEWEST_ON_CPU` to `MOST_ON_CPU` rows if `limit`
    allows it. On a GPU a batch has `limit` rows, or a quarter of that if at most three quarters remain.
    """
    if device.type == "cpu":
        fewest = min(FEWEST_ON_CPU, limit)
        slices = even_slices(count, min(limit, MOST_ON_CPU), device, fewest)
        return [_padded(part.start, part.stop, fewest) for part in slices]
    full, quarter = gpu_batch_sizes(limit)
    cut = []
    start = 0
    while start < count:
        size = full if count - start > full - quarter else quarter
        cut.append(_padded(start, min(start + size, count), size))
        start += size
    return cut


def _padded(start: int, stop: int, fewest: int) -> PaddedBatch:
    """Rows `start` to `stop`, the last one repeated up to `fewest`."""
    rows = range(start, stop)
    return PaddedBatch([*rows, *[rows[-1]] * (fewest - len(rows))], len(rows))


def gpu_batch_sizes(limit: int) -> tuple[int, int]:
    """The two sizes of a GPU's batches: few, because blocks are compiled for each."""
    return limit, max(1, limit // 4)
