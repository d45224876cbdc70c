"""How iterations to a reward depend on the numbers of candidates and kept samples: `python benchmarks/fast/law.py`.

Takes runs of fast.json that differ in these numbers alone, of each world and seed. The signal of a prompt is the sum of
the squared advantages of its kept samples, of normal rewards whose proxy has the rank correlation of four fitted steps.
The exponent is the slope of log iterations over log signal within world and seed, with a bootstrap interval over these.
"""

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from paper.pace import first_reached

from fast.arms import ALL, BASELINE, FAST, PLAIN, UNEXPLORED
from fast.page import SHARES, gains, height

CORRELATION = 0.9
FAMILIES = {
    "confirm": {FAST: (24, 4), PLAIN: (12, 12), UNEXPLORED: (4, 4), ALL: (24, 24)},
    "screen 3": {"4-in-24 L4 geo20 D5": (24, 4), "6-in-24 L4 geo20 D5": (24, 6), "8-in-24 L4 geo20 D5": (24, 8)},
    "screen 4": {"4-in-24 geo20": (24, 4), "6-in-24 geo20": (24, 6), "8-in-24 geo20": (24, 8), "8-in-8 geo20": (8, 8)},
    "screen 5": {"4-in-24 L4 geo20 R": (24, 4), "6-in-24 L4 geo20 R": (24, 6), "8-in-24 L4 geo20 R": (24, 8)},
    "screen 8": {"60 it": (24, 4), "60 it, 6-in-24": (24, 6), "60 it, 12-in-12": (12, 12), "60 it, 8-in-8": (8, 8)},
    "screen 10": {FAST: (24, 4), "6-in-24": (24, 6), "8-in-24": (24, 8)},
}
"""Stage → arms with one update, and their candidates and kept samples."""


class Law(NamedTuple):
    """Fit to one share of the baseline's best gain: slope, its 95 % interval, residual in log, runs, worlds × seeds."""

    exponent: float
    low: float
    high: float
    residual: float
    runs: int
    cells: int


@cache
def signal_of(candidates: int, keep: int) -> float:
    """Signal of a prompt with normal rewards; the proxy of plain recipes is exact."""
    random = torch.Generator().manual_seed(0)
    true, noise = (torch.randn(20000, candidates, generator=random) for _ in range(2))
    proxy = true if candidates == keep else CORRELATION * true + math.sqrt(1 - CORRELATION**2) * noise
    order = proxy.argsort(dim=1, stable=True)
    true = true.double()
    kept = true.gather(1, torch.cat([order[:, : keep // 2], order[:, candidates - keep // 2 :]], 1))
    squares = (kept - kept.mean(1, keepdim=True)) ** 2 / true.var(1, keepdim=True)
    return float(squares.sum(1).mean())


def fit(rows: Sequence[Mapping[str, Any]], share: float) -> Law | None:
    """The law for a share of the baseline's best gain, by runs that reach it; None if fewer than two cells have any."""
    best = {(row["stage"], row["world"], row["seed"]): height(row) for row in rows if row["arm"] == BASELINE}
    cells: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        numbers, cell = FAMILIES.get(row["stage"], {}).get(row["arm"]), (row["stage"], row["world"], row["seed"])
        if numbers is None or cell not in best:
            continue
        if math.isfinite(reached := first_reached(gains(row), share * best[cell])):
            cells[cell].append((math.log(signal_of(*numbers)), math.log(reached)))
    centred = [np.array(points) - np.mean(points, 0) for points in cells.values() if len(points) > 1]
    if len(centred) < 2:
        return None
    random, every = np.random.default_rng(0), np.concatenate(centred)
    drawn = [
        _slope(np.concatenate([centred[index] for index in random.integers(len(centred), size=len(centred))]))
        for _ in range(2000)
    ]
    exponent = _slope(every)
    residual = float((every[:, 1] - exponent * every[:, 0]).std())
    return Law(exponent, *np.percentile(drawn, [2.5, 97.5]), residual, len(every), len(centred))


def _slope(points: Any) -> float:
    return float((points[:, 0] * points[:, 1]).sum() / (points[:, 0] ** 2).sum())


def section(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown of the fits; empty without runs for them."""
    laws = {share: law for share in SHARES if (law := fit(rows, share))}
    lines = [
        "## Numbers of samples",
        "",
        "By `python benchmarks/fast/law.py`: in runs that differ only in candidates and kept samples, iterations to a",
        "share of the baseline's best gain go as the *signal* to this power. The signal is the kept samples' sum of",
        "squared advantages, for normal rewards and a rank correlation of 0.9. *Residual*: standard deviation of log",
        "iterations.",
        "",
        "| gain | power | residual | runs | worlds × seeds |",
        "|---|---|---|---|---|",
    ]
    for share, law in laws.items():
        power = f"{law.exponent:.2f} [{law.low:.2f}, {law.high:.2f}]"
        lines.append(f"| {share:.0%} | {power} | {law.residual:.2f} | {law.runs} | {law.cells} |")
    return "\n".join(lines) + "\n" if laws else ""


def main() -> None:
    """Print the section of fast.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    print(section(json.loads((Path(__file__).parents[1] / "results/fast.json").read_text())["rows"]))


if __name__ == "__main__":
    main()
