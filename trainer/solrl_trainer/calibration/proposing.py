"""Numbers of candidates and kept samples: which of them a calibration's scores and times let a run learn fastest with.

The kept samples of a prompt are its gradient, each weighted by its advantage. In the runs of
benchmarks/results/fast.md with one update and different numbers of candidates and kept samples, iterations to a reward
fall with the sum of the squared advantages to the power 0.6, and `python benchmarks/fast/law.py` prints that fit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

EXPONENT = 0.6
KEPT = (4, 6, 8, 12)
"""Numbers of kept samples in the runs of the fit."""
FEWEST = 0.5
"""Smallest number of candidates, as a share of the calibration's: smaller groups of the same scores vary too much."""
PASSES = 4.0
"""Solver steps in BF16 that take as long as training a sample at one noise level without a reference: 3.5 to 4.1 by
equal_gpus.json and training_phase.json for FLUX.1, SD3.5-Large and SANA."""


@dataclass(frozen=True)
class Proposal:
    """`explore.candidates` and `explore.keep`, the seconds of a prompt, and the speed of learning: 1 for the run's."""

    candidates: int
    keep: int
    seconds: float
    speed: float


def proposals(
    proxy: torch.Tensor, true: torch.Tensor, keep: int, *, explored: float, step: float, steps: int, levels: int
) -> list[Proposal]:
    """Numbers of candidates and kept samples, the fastest first; those of the run are among them.

    Args:
        proxy: scores [prompts, N] by the exploring plan.
        true: scores [prompts, N] of the same seeds in BF16.
        keep: the run's number of kept samples.
        explored: seconds to explore and score one candidate by the plan.
        step: seconds of a solver step of one image in BF16.
        steps: of a regenerated sample.
        levels: noise levels at which a sample is trained.
    """
    most = proxy.shape[1]
    sizes = sorted({most, *range(8, most, 8)} - set(range(1, int(FEWEST * most))))
    sample = step * (steps + PASSES * levels)
    rates = {}
    for size in sizes:
        for kept in sorted({keep, *KEPT}):
            if kept < size or (size, kept) == (most, keep):
                seconds = size * explored + kept * sample
                rates[size, kept] = seconds, signal(proxy, true, size, kept) ** EXPONENT / seconds
    _, present = rates[most, keep]
    ordered = sorted(rates.items(), key=lambda item: -item[1][1])
    return [Proposal(*numbers, seconds, rate / present if present else 1.0) for numbers, (seconds, rate) in ordered]


def signal(proxy: torch.Tensor, true: torch.Tensor, size: int, keep: int) -> float:
    """Sum of the squared advantages of the kept samples of a prompt, mean over prompts; a group's variance is 1.

    Of every `size` candidates in `proxy` and `true` [prompts, N], the proxy selects `keep`, half from either end.
    """
    sums = []
    for start in range(0, proxy.shape[1] - size + 1, size):
        part = slice(start, start + size)
        order = proxy[:, part].argsort(dim=1, stable=True)
        ends = torch.cat([order[:, : keep // 2], order[:, size - keep // 2 :]], 1)
        scale = true.double().var(1, keepdim=True)
        chosen = true[:, part].double().gather(1, ends)
        squares = (chosen - chosen.mean(1, keepdim=True)) ** 2 / scale.clamp_min(1e-30)
        sums.append(squares.sum(1) * (scale[:, 0] > 0))
    return float(torch.stack(sums).mean())


def text(best: Sequence[Proposal], present: Proposal) -> str:
    """A line about the fastest numbers, such as "explore.candidates=24 explore.keep=6: expected to learn 1.2 × as fast
    as 24 and 4 (5.9 s a prompt in place of 4.5)"."""
    first = best[0]
    if first == present:
        return f"{present.candidates} candidates and {present.keep} kept are expected to learn fastest of {len(best)}"
    return (
        f"explore.candidates={first.candidates} explore.keep={first.keep}: expected to learn {first.speed:.2f} × as "
        f"fast as {present.candidates} and {present.keep} ({first.seconds:.2g} s a prompt in place of "
        f"{present.seconds:.2g})"
    )
