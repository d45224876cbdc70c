"""The page: how soon each arm reaches shares of the baseline's best gain, how high it comes, and whether it stays."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from paper.intervals import Estimate, over_seeds
from paper.pace import first_reached
from support.results import table

from fast.arms import BASELINE, STAGES
from fast.cost import SHAPES

Row = Mapping[str, Any]
SHARES = (0.5, 0.7, 0.9)
CENSORED = 1.5
"""A run that does not get there counts as so many times its own length."""
INTRODUCTION = """# GPU time to a reward

By `python benchmarks/fast STAGE`. *Time* is the GPU time in which drawing 24 samples and training on all of them with
β = 1 reaches a share of its own best held-out gain, over that of the arm with the same seed: above 1, the arm is
faster. Seconds are those of {} on one H200, computed from [equal_gpus.md](equal_gpus.md) for the samples, steps and
pairs of the arm; a run with the six noise levels of the miniatures' presets is charged for those of the large model's,
four for FLUX.1. A run that never gets there counts as {:g} × its length. *Best* is the highest gain less the
baseline's, *end* the last gain as a share of the run's own best, *judge* the gain of the detector that no run trains
on when the run reaches 90 %, less the baseline's then; gains are in standard deviations of the base's images of a
prompt. Brackets are 95 % intervals over seeds.
"""


def page(stored: Mapping[str, Any]) -> str:
    """Markdown of all stages with runs of the baseline; `stored` is the content of fast.json."""
    parts = [INTRODUCTION.format(SHAPES["flux"], CENSORED)]
    for stage in dict.fromkeys(row["stage"] for row in stored["rows"]):
        rows = [row for row in stored["rows"] if row["stage"] == stage]
        parts.append(f"## {stage.capitalize()}\n")
        if about := stored.get("about", {}).get(stage):
            parts.append(f"{about}\n")
        if stage in STAGES:
            parts.append(_pooled(rows))
        for world in dict.fromkeys(row["world"] for row in rows):
            parts.append(f"### {world}\n\n{_of_world([row for row in rows if row['world'] == world])}\n")
    return "\n".join(parts)


def _of_world(rows: Sequence[Row]) -> str:
    cells = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        pairs = paired(rows, arm)
        if not pairs:
            continue
        times = [_ratio([ratio(run, base, share) for run, base in pairs]) for share in SHARES]
        best = [height(run) - height(base) for run, base in pairs]
        ends = [last(run) / height(run) if height(run) > 0 else -math.inf for run, _ in pairs]
        judged = [judge_at_target(run, base) for run, base in pairs]
        known = [value for value in judged if value is not None]
        seconds = pairs[0][0]["seconds"]["flux"] / _prompts(pairs[0][0])
        cells.append(
            (
                arm,
                f"{seconds:.1f}",
                *times,
                f"{over_seeds(np.array(best)):+.2f}",
                " ".join(f"{end:.2f}" for end in ends),
                f"{np.mean(known):+.2f}" if known else "",
                len(pairs),
            )
        )
    head = ("arm", "s per prompt", *(f"time, {share:.0%}" for share in SHARES), "best, sd", "end", "judge, sd", "seeds")
    return "\n".join(table(head, cells))


def _pooled(rows: Sequence[Row]) -> str:
    """Ratios pooled over worlds: the mean of logarithms of a seed is one value."""
    cells, worlds = [], dict.fromkeys(row["world"] for row in rows)
    for arm in dict.fromkeys(row["arm"] for row in rows):
        by_world = [{run["seed"]: (run, base) for run, base in paired(_in(rows, world), arm)} for world in worlds]
        seeds = sorted(set.intersection(*(set(one) for one in by_world))) if by_world else []
        if not seeds or arm == BASELINE:
            continue
        cells.append(
            (
                arm,
                *(
                    _ratio([_mean([ratio(*one[seed], share, shape) for one in by_world]) for seed in seeds])
                    for shape in SHAPES
                    for share in (0.7, 0.9)
                ),
                len(seeds),
            )
        )
    if not cells:
        return ""
    head = [f"{SHAPES[shape].partition(' ')[0]}, {share:.0%}" for shape in SHAPES for share in (0.7, 0.9)]
    return "\n".join(["All worlds, by shape and share:\n", *table(("arm", *head, "seeds"), cells), ""])


def _in(rows: Sequence[Row], world: str) -> list[Row]:
    return [row for row in rows if row["world"] == world]


def paired(rows: Sequence[Row], arm: str) -> list[tuple[Row, Row]]:
    """The runs of an arm in one world, each with the baseline's run of the same seed."""
    bases = {row["seed"]: row for row in rows if row["arm"] == BASELINE}
    return [(row, bases[row["seed"]]) for row in rows if row["arm"] == arm and row["seed"] in bases]


def gains(run: Row, column: int = 0) -> list[tuple[int, float]]:
    """The curve in standard deviations of the base; column 1 is the judge."""
    start = run["curve"][0][column + 1]
    return [(point[0], (point[column + 1] - start) / run["within"][column]) for point in run["curve"]]


def height(run: Row) -> float:
    """The highest gain of the trained reward."""
    return max(gain for _, gain in gains(run))


def last(run: Row) -> float:
    """The last gain of the trained reward."""
    return gains(run)[-1][1]


def ratio(run: Row, base: Row, share: float, shape: str = "flux") -> float:
    """GPU time of the baseline over that of a run, to a share of the baseline's best gain."""
    times = []
    for one in (base, run):
        reached = first_reached(gains(one), share * height(base))
        times.append(min(reached, CENSORED * one["iterations"]) * one["seconds"][shape])
    return times[0] / times[1]


def judge_at_target(run: Row, base: Row, share: float = 0.9) -> float | None:
    """The judge's gain when the run reaches the target, less the baseline's then; None without a judge or a target."""
    if len(run["within"]) < 2:
        return None
    values = []
    for one in (run, base):
        reached = first_reached(gains(one), share * height(base))
        if not math.isfinite(reached):
            return None
        versions, judged = zip(*gains(one, 1), strict=True)
        values.append(float(np.interp(reached, versions, judged)))
    return values[0] - values[1]


def _prompts(run: Row) -> int:
    return int(run["changes"].get("explore.prompts", 12))


def _mean(ratios: Sequence[float]) -> float:
    return math.exp(float(np.mean(np.log(ratios))))


def _ratio(ratios: Sequence[float]) -> str:
    """Geometric mean of the seeds' ratios, with its interval from three seeds on."""
    logs = over_seeds(np.log(ratios))
    mean, low, high = (math.exp(min(value, 50.0)) for value in (logs.mean, logs.low, logs.high))
    estimate = Estimate(mean, low, high, logs.seeds)
    return f"{estimate:.2f}" if len(ratios) > 2 else f"{mean:.2f}"
