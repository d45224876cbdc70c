"""Prediction for other group sizes and numbers of selected candidates, from subsets of the measured groups."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.stats import rankdata
from solrl_engine.sampler import survivors
from solrl_proto.selection import best_worst

from solrl_trainer.algorithms.rounding import levelled_groups
from solrl_trainer.calibration.deciding import IntervalEstimate
from solrl_trainer.records.evaluations import mean_interval

STEP = 24
"""Predicted group sizes are multiples of this, and the measured size."""
ENDS = (4, 8, 12)
"""Candidates selected from either end of a group."""
SUBSETS = 64
"""Random subsets of a measured group for each size."""


@dataclass(frozen=True)
class GroupSize:
    """Prediction for one group size and number of selected candidates.

    Attributes:
        candidates: candidates per prompt.
        keep: selected candidates, half from either end: `explore.keep`.
        separation: difference in true rank between the selected best and worst: 1 perfect, 0 chance.
        contrast: difference of their mean true scores, in standard deviations of the measured group. A larger group
            has more extreme candidates, which raises this, not the separation.
    """

    candidates: int
    keep: int
    separation: IntervalEstimate
    contrast: IntervalEstimate


def group_sizes(
    final: torch.Tensor, halfway: torch.Tensor | None, true: torch.Tensor, *, kept: int, ends: Sequence[int] = ENDS
) -> list[GroupSize]:
    """Predictions for the multiples of 24 below the measured size, and for that size.

    Each subset of a group is pruned and selected from as if it were the group.

    Args:
        final: scores [prompts, N] after the last step, without pruning.
        halfway: scores [prompts, N] by which candidates are pruned; None without pruning.
        true: true scores [prompts, N].
        kept: candidates that pruning keeps of N; smaller groups keep the same share.
        ends: numbers of candidates selected from either end; too large ones are left out.
    """
    count = true.shape[1]
    found = []
    for size in [*range(STEP, count, STEP), count]:
        left = size if halfway is None else round(kept * size / count)
        able = [end for end in ends if 2 * end <= left]
        if not able:
            continue
        parts = []
        for prompt in range(len(true)):
            rows = _subsets(count, size, prompt)
            early = None if halfway is None else halfway[prompt].double()[rows]
            parts.append(_selections(final[prompt].double()[rows], early, true[prompt].double()[rows], left, able))
        scales = np.maximum(levelled_groups(true).double().std(1, correction=0).numpy(), np.finfo(np.float64).tiny)
        for at, end in enumerate(able):
            apart, score = (np.array([part[at][which] for part in parts]) for which in (0, 1))
            found.append(
                GroupSize(
                    size,
                    2 * end,
                    IntervalEstimate(*mean_interval(apart)),
                    IntervalEstimate(*mean_interval(score / scales)),
                )
            )
    return found


def _subsets(count: int, size: int, prompt: int) -> npt.NDArray[np.int64]:
    """Random subsets [subsets, size] in ascending order; smaller ones of a prompt are parts of larger ones."""
    if size == count:
        return np.arange(count)[None]
    every = np.tile(np.arange(count), (SUBSETS, 1))
    return np.sort(np.random.default_rng(prompt).permuted(every, axis=1)[:, :size], axis=1)


def _selections(
    final: torch.Tensor, halfway: torch.Tensor | None, true: torch.Tensor, left: int, ends: Sequence[int]
) -> list[tuple[float, float]]:
    """For each number selected from either end: separation, and difference of true scores; means over subsets.

    Scores are [subsets, size]; pruning by `halfway` leaves `left` candidates.
    """
    size = true.shape[1]
    orders = []
    for row in range(len(true)):
        kept = list(range(size)) if halfway is None else survivors(halfway[row], left)
        orders.append([kept[place] for place in best_worst(final[row, kept].tolist(), len(kept))])
    ranks = np.take_along_axis(rankdata(-true, axis=1), np.array(orders), 1)
    scores = np.take_along_axis(true.numpy(), np.array(orders), 1)
    found = []
    for end in ends:
        apart = (ranks[:, -end:].mean() - ranks[:, :end].mean()) / (size - end)
        found.append((float(apart), float(scores[:, :end].mean() - scores[:, -end:].mean())))
    return found


def group_sizes_text(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines of a small table of `rows` as in calibration.json, a line per group size."""
    keeps = sorted({row["keep"] for row in rows})
    cells = {(row["candidates"], row["keep"]): f"{row['separation']:.2f} / {row['contrast']:.2f}" for row in rows}
    lines = ["candidates" + "".join(f"{f'keep {keep}':>14}" for keep in keeps)]
    for size in sorted({row["candidates"] for row in rows}):
        lines.append(f"{size:>10}" + "".join(f"{cells.get((size, keep), '–'):>14}" for keep in keeps))
    return lines
