"""The page: how soon each arm reaches shares of the baseline's best gain, how high it comes, and whether it stays."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
from paper.intervals import Estimate
from paper.pace import first_reached
from scipy.stats import t as student
from support.results import table

from fast.arms import ALL, BASELINE, CONFIRM, FAST, STAGES, UNEXPLORED, experiment
from fast.cost import PAIRS, SHAPES, fast_run, seconds_of_iteration, seconds_of_prompt

Row = Mapping[str, Any]
SHARES = (0.5, 0.7, 0.9)
POOLED = "all worlds"
CENSORED = 1.5
"""A run that does not get there counts as so many times the iterations of the baseline."""
PATIENCE = 0.4
"""`evaluate.stop_after` of the recipe: the share of the iterations without a new best, after which a run ends."""
INTRODUCTION = """# GPU time to a reward

By `python benchmarks/fast STAGE`: how soon a recipe, an *arm*, reaches a reward. The baseline draws 24 samples of a
prompt and trains on all of them with β = 1.

{asked}

{columns}
"""
COLUMNS = {
    "arm": "*K-in-N* draws N images of a prompt and trains on the best and worst K",
    "s per prompt": f"GPU seconds to draw and train a prompt's samples, for {SHAPES['flux']} on one H200, computed "
    f"from [equal_gpus.md](equal_gpus.md). Of the miniatures' six noise levels, the {PAIRS['flux']} of FLUX.1's preset "
    "are charged. The update of `fast` has no pull to a reference, and omits its pass: 24-in-24 takes {cheaper:.1f} s "
    "with it, {base:.1f} s with β = 1. Evaluations are not counted",
    "speed-up, 50 %": "time of the baseline to this share of its own best held-out gain, over that of the arm with "
    f"the same seed. A run that never gets there counts as {CENSORED:g} × the iterations of the baseline; of more than "
    "half of the runs, that gives a limit, *at most*",
    "by SD3.5-L, by SANA": "the same to 90 %, by seconds of these models",
    "time over fast's": "time of the arm to 90 %, over that of `fast`",
    "best, sd": "highest gain less the baseline's, in standard deviations of the base's images of a prompt",
    "judge, sd": "gain of the detector that no run trains on when the run reaches 90 %, less the baseline's then; "
    "of runs that get there",
    "kept, lowest": f"gain of the version that a run exports if it ends without a new best in {100 * PATIENCE:.0f} % "
    "of its iterations, as a share of its best",
    "end, each run": "last gain as a share of the run's own best",
    "short": "runs that never reach 90 %",
    "[1.2, 1.8]": "95 % interval over seeds; of all worlds, for the mean of these four worlds, not of other models",
}
"""Column of the stages' tables → what it says."""
ASKED = {
    "confirm": "How much sooner is `fast` there than plain recipes and Sol-RL? Four miniatures, seeds of no screen",
    "confirm, before": "The same with an earlier `fast`",
    "screen 1": "What keeps a small β from running away?",
    "screen 2": "Does a β that grows help?",
    "screen 3": "And together with averaging?",
    "screen 4": "And in 100 iterations?",
    "screen 5": "Should averaging begin at once?",
    "screen 6": "Which values? `fast` was chosen here",
    "screen 7": "How good are plain recipes with this update?",
    "screen 8": "Are shorter runs or AWM better? What ends the late fall?",
    "screen 9": "Which of two changes ends it? `fast` took both",
    "screen 10": "Does a change help the judge? `fast` stayed",
}
"""Stage → its question, for the list of contents."""
LOOP = """## An iteration at true size

By `python benchmarks/fast/loop.py MODEL`: seconds of one iteration of `fast` with random weights on one GPU, by the
trainer's own loop, and those computed from [equal_gpus.md](equal_gpus.md). Evaluation is not included.
Each row is the second iteration of a run; its first compiled. FLUX.1's run had the settings of loop.py, which was
written afterwards; SD3.5-Large's was stored from its log, because a time limit cut the command's end.
Start: seconds before that which a later iteration does not take, for loading and compiling: FLUX.1's is read from
the log of another run of the command, with ten CPU cores and weights in files in memory.
"""
CHARGED = """In the presets, `fast` explores in six steps, and a prompt takes {:.1f} s. If six steps select no worse
than these four fitted ones, `fast` has a speed-up of {} to 90 %. Fitting them is not counted.
"""
UNREACHED = """To 50 %, the time of 4-in-4 over that of `fast` is {}. To 90 %, {} of {} runs of 4-in-4 never get there:
its figures are limits, and its judge is of {} runs on {} alone.
"""


def page(stored: Mapping[str, Any]) -> str:
    """Markdown of all stages; `stored` is the content of fast.json."""
    stages = sorted(dict.fromkeys(row["stage"] for row in stored["rows"]), key=_order)
    parts = [_introduction(stages)]
    if loop := stored.get("loop"):
        parts.append(f"{LOOP}\n{_loop(loop)}\n")
    for stage in stages:
        rows = [row for row in stored["rows"] if row["stage"] == stage]
        parts.append(f"## {stage.capitalize()}\n")
        if about := stored.get("about", {}).get(stage):
            parts.append(f"{about}\n")
        if all(row["arm"] != BASELINE for row in rows):
            parts.append(f"{_beside_fast(rows)}\n")
            continue
        of_stage = figures(rows)
        if stage not in STAGES:
            del of_stage[POOLED]
        for world, arms in of_stage.items():
            parts += [f"### {world}\n\n{_table(arms)}\n"] if arms else []
            if world == POOLED:
                parts += _notes(arms)
    return "\n".join(parts)


def _introduction(stages: Sequence[str]) -> str:
    """What each stage asks, and what the columns are."""
    titles = {stage: stage.capitalize() for stage in stages if stage in ASKED}
    links = {stage: title.lower().replace(",", "").replace(" ", "-") for stage, title in titles.items()}
    base, cheaper = (
        sum(seconds_of_prompt(experiment(CONFIRM, CONFIRM.worlds[0], arm, 201).config, "flux").values())
        for arm in (BASELINE, ALL)
    )
    stages_asked = [(f"[{title}](#{links[stage]})", ASKED[stage]) for stage, title in titles.items()]
    columns = [(name, said.format(base=base, cheaper=cheaper)) for name, said in COLUMNS.items()]
    return INTRODUCTION.format(
        asked="\n".join(table(("stage", "asks"), stages_asked)),
        columns="\n".join(table(("column", "meaning"), columns)),
    )


def _beside_fast(rows: Sequence[Row]) -> str:
    """Table of a stage without the baseline: runs of changes of `fast` beside those of `fast` with the same seed."""
    cells = []
    for world in dict.fromkeys(row["world"] for row in rows):
        for arm, pairs in beside_fast([row for row in rows if row["world"] == world]).items():
            judged = [gain for run, fast in pairs if (gain := judge_at_target(run, fast)) is not None]
            ends = " ".join(f"{end:.2f}" for end in sorted(last(run) / height(run) for run, _ in pairs))
            judge = f"{statistics.mean(judged):+.3f}" if judged else ""
            cells.append((world, arm, f"{times_as_long(pairs):.2f}", judge, ends))
    heads = ("world", "arm", f"its time to 90 % of the best of {FAST}, over that of {FAST}", "judge, sd", "ends")
    return "\n".join(table(heads, cells)) if cells else ""


def _order(stage: str) -> tuple[bool, str, int]:
    """What is published first, then the rest by name and number."""
    name, _, number = stage.rpartition(" ")
    return (stage not in STAGES, name, int(number)) if number.isdigit() else (stage not in STAGES, stage, 0)


def beside_fast(rows: Sequence[Row]) -> dict[str, list[tuple[Row, Row]]]:
    """Arm → its runs, each with the run of `fast` in the same world with the same seed."""
    fast = {(row["world"], row["seed"]): row for row in rows if row["arm"] == FAST}
    arms: dict[str, list[tuple[Row, Row]]] = {}
    for row in rows:
        if base := fast.get((row["world"], row["seed"])):
            arms.setdefault(row["arm"], []).append((row, base))
    return arms


def times_as_long(pairs: Sequence[tuple[Row, Row]]) -> float:
    """GPU time of the first runs to 90 % of the second ones' best gain, over theirs."""
    return 1 / statistics.geometric_mean(ratio(run, base, 0.9) for run, base in pairs)


def _notes(arms: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Sentences on `fast` with the steps of its preset, and beside 4-in-4, if there are such runs."""
    notes = []
    if FAST in arms:
        notes.append(CHARGED.format(preset_seconds(), _cell(by_preset(arms[FAST]))))
    if four := arms.get(UNEXPLORED):
        judged, worlds = len(four["judged"]), " and ".join(dict.fromkeys(four["judged"]))
        notes.append(UNREACHED.format(_cell(four["over"]["50%"]), four["short"], four["runs"], judged, worlds))
    return notes


def preset_seconds() -> float:
    """Seconds of a FLUX.1 prompt of the preset `fast`."""
    return sum(seconds_of_prompt(fast_run("flux"), "flux").values())


def by_preset(fast: Mapping[str, Any]) -> dict[str, float]:
    """`time` of `fast` to 90 %, with the exploring steps of its preset."""
    cost = preset_seconds() / fast["seconds"]
    time = fast["time"]["flux"]["90%"]
    return time | {name: time[name] / cost for name in ("mean", "low", "high")}


def _loop(loop: Mapping[str, Mapping[str, Any]]) -> str:
    phases = ("explore", "regenerate", "train", "push")
    rows = [
        (
            SHAPES[model],
            row["device"].removeprefix("NVIDIA "),
            row["prompts"],
            row["steps"],
            *(f"{row['seconds'][phase]:.1f}" for phase in phases),
            f"{row['clock']:.1f}",
            f"{seconds_of_iteration(fast_run(model), model):.1f}",
            f"{row['clock'] / row['prompts']:.2f}",
            f"{row['start']:.0f}" if "start" in row else "",
        )
        for model, row in loop.items()
    ]
    heads = (
        "model",
        "GPU",
        "prompts",
        "exploring steps",
        *phases,
        "by the clock",
        "computed",
        "s per prompt",
        "start",
    )
    return "\n".join(table(heads, rows))


def figures(rows: Sequence[Row]) -> dict[str, Any]:
    """Figures of a stage: "all worlds", and world → those of this world.

    Each has arm → `seconds` of a FLUX.1 prompt; `time` by shape and share, `over` by share (the arm's time over that of
    `fast`), `best`, `judge` and `judge, 70%` as intervals; `judged`, the worlds of the runs that have a `judge`; `ends`
    and `kept` of all runs; numbers of `worlds`, of `runs`, and of those `short` of 90 %. A figure that no run has is
    None.
    """
    worlds = list(dict.fromkeys(row["world"] for row in rows))
    return {POOLED: _figures(rows, worlds), **{world: _figures(rows, [world]) for world in worlds}}


def _figures(rows: Sequence[Row], worlds: Sequence[str]) -> dict[str, Any]:
    fast = {(row["world"], row["seed"]): row for row in rows if row["arm"] == FAST}
    arms = {}
    for arm in dict.fromkeys(row["arm"] for row in rows):
        by_world = [paired([row for row in rows if row["world"] == world], arm) for world in worlds]
        by_world = [pairs for pairs in by_world if pairs]
        runs = [run for pairs in by_world for run, _ in pairs]
        if not runs:
            continue
        beside = [[pair for pair in pairs if (pair[0]["world"], pair[0]["seed"]) in fast] for pairs in by_world]

        def over(share: float, run: Row, base: Row) -> float:
            return ratio(fast[run["world"], run["seed"]], base, share) / ratio(run, base, share)

        arms[arm] = {
            "seconds": runs[0]["seconds"]["flux"] / _prompts(runs[0]),
            "time": {
                shape: {
                    f"{share:.0%}": _mean(by_world, lambda run, base: ratio(run, base, share, shape), logs=True)  # noqa: B023
                    for share in SHARES
                }
                for shape in SHAPES
            },
            "over": {f"{share:.0%}": _mean(beside, partial(over, share), logs=True) for share in SHARES},
            "best": _mean(by_world, lambda run, base: height(run) - height(base)),
            "judge": _mean(by_world, judge_at_target),
            "judge, 70%": _mean(by_world, partial(judge_at_target, share=0.7)),
            "judged": [
                run["world"] for pairs in by_world for run, base in pairs if judge_at_target(run, base) is not None
            ],
            "ends": [last(run) / height(run) if height(run) > 0 else -math.inf for run in runs],
            "kept": [kept(run) / height(run) if height(run) > 0 else -math.inf for run in runs],
            "worlds": len(by_world),
            "runs": len(runs),
            "short": sum(height(run) < 0.9 * height(base) for pairs in by_world for run, base in pairs),
        }
    return arms


def _mean(
    by_world: Sequence[Sequence[tuple[Row, Row]]], value: Callable[[Row, Row], float | None], logs: bool = False
) -> dict[str, float] | None:
    """Mean over worlds of a world's mean over seeds, with its interval; geometric with `logs`.

    Runs of different worlds are independent, so the variance is that of the worlds' means (Satterthwaite's formula).
    Only worlds and runs that have the value.
    """
    worlds = [[value(run, base) for run, base in pairs] for pairs in by_world]
    known = [np.array([number for number in world if number is not None], float) for world in worlds]
    known = [np.log(world) if logs else world for world in known if len(world)]
    if not known:
        return None
    mean, fewest = float(np.mean([world.mean() for world in known])), min(map(len, known))
    half = math.inf
    if fewest > 1:
        parts = np.array([world.var(ddof=1) / len(world) for world in known])
        total = parts.sum()
        freedom = (
            total**2 / sum(part**2 / (len(world) - 1) for part, world in zip(parts, known, strict=True)) if total else 1
        )
        half = float(student.ppf(0.975, freedom) * math.sqrt(total) / len(known))
    limits = mean, mean - half, mean + half
    return asdict(Estimate(*((math.exp(min(x, 50.0)) for x in limits) if logs else limits), fewest))


def _table(arms: Mapping[str, Mapping[str, Any]]) -> str:
    heads = (
        "arm",
        "s per prompt",
        *(f"speed-up, {100 * share:.0f} %" for share in SHARES),
        *(f"by {SHAPES[shape].partition(' ')[0]}" for shape in SHAPES if shape != "flux"),
        f"time over {FAST}'s",
        "best, sd",
        "judge, sd",
        "kept, lowest",
        "end, each run",
        "short",
        "runs",
    )
    rows, short = [], arms.get(FAST, {}).get("short")
    for arm, each in arms.items():
        ends = [f"{end:.2f}" for end in each["ends"]]
        limit = 2 * each["short"] > each["runs"]
        rows.append(
            (
                arm,
                f"{each['seconds']:.1f}",
                *(_cell(each["time"]["flux"][f"{share:.0%}"]) for share in SHARES[:-1]),
                *(_cell(each["time"][shape]["90%"], limit="at most " if limit else "") for shape in SHAPES),
                "" if limit and short else _cell(each["over"]["90%"], limit="at least " if limit else ""),
                _cell(each["best"], "+.2f"),
                _cell(each["judge"], "+.2f"),
                f"{min(each['kept']):.2f}",
                " ".join(ends) if len(ends) < 5 else f"{min(each['ends']):.2f} to {max(each['ends']):.2f}",
                each["short"],
                each["runs"],
            )
        )
    return "\n".join(table(heads, rows))


def _cell(value: Mapping[str, Any] | None, spec: str = ".2f", limit: str = "") -> str:
    """A figure, with its interval from three seeds on unless it is a limit."""
    if value is None:
        return ""
    estimate = Estimate(**value)
    if limit:
        return f"{limit}{estimate.mean:{spec}}"
    return f"{estimate:{spec}}" if estimate.seeds > 2 else f"{estimate.mean:{spec}}"


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
    base_time, time = (
        min(first_reached(gains(each), share * height(base)), CENSORED * base["iterations"]) * each["seconds"][shape]
        for each in (base, run)
    )
    return base_time / time


def judge_at_target(run: Row, base: Row, share: float = 0.9) -> float | None:
    """The judge's gain when the run reaches the target, less the baseline's then; None without a judge or a target."""
    if len(run["within"]) < 2:
        return None
    values = []
    for each in (run, base):
        reached = first_reached(gains(each), share * height(base))
        if not math.isfinite(reached):
            return None
        versions, judged = zip(*gains(each, 1), strict=True)
        values.append(float(np.interp(reached, versions, judged)))
    return values[0] - values[1]


def kept(run: Row) -> float:
    """The gain of the version that the run exports, if it ends without a new best in `PATIENCE` of its iterations."""
    best, since = 0.0, 0
    for version, gain in gains(run):
        if gain > best:
            best, since = gain, version
        elif version - since >= PATIENCE * run["iterations"]:
            break
    return best


def _prompts(run: Row) -> int:
    return int(run["changes"].get("explore.prompts", 12))
