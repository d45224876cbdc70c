"""Figures of the pages of evidence that take several results, by their names."""

import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from evidence.formats import TITLES, WORDS, Interval, over, series, signed, span
from fast.arms import ALL, BASELINE, CONFIRM, FAST, FAST_UPDATE, PLAIN, STEEP, UNEXPLORED, experiment
from fast.arms import PAPER as SOL_RL
from fast.cost import PRESETS, SHAPES, fast_run, hours_of_run, seconds_of_iteration
from fast.page import (
    PATIENCE,
    POOLED,
    beside_fast,
    by_preset,
    gains,
    height,
    paired,
    preset_seconds,
    ratio,
    times_as_long,
)
from fast.page import figures as of_recipes
from paper.intervals import over_seeds
from paper.published import SPEED_UP
from peer_drives.turns import LEARNINGS
from peer_rewards import FRESH, MARGIN, PROMPTS, SAMPLES, halves, spans
from peers import facts_of
from scipy.stats import t as student
from solrl_trainer.settings.config import RunConfig
from solrl_trainer.settings.presets import resolve

CHUNK = 24
"""Candidates that engines were timed with."""
TURNS = 5
"""Turns of trainings beside a peer's that are shown as their mean."""
Read = Callable[[str], Any]
"""Content of a stored result by its name, the path in benchmarks/results without `.json`."""
MODELS = ("flux", "sd3", "sana")
FALLS = "mini-sd3, hpsv2"
"""The world whose runs fall after their peak."""
CHANGES_STAGE = "screen 10"
"""The stage that has changes of today's `fast`."""
AWM_STAGE, EARLIER_FAST = "screen 8", "100 it"
"""The stage that has AWM, and its name of the `fast` of that time."""
TOGETHER = (
    "prompts: my_prompts",
    "guidance: 3.5",
    "explore.prompts: 12",
    "evaluate.every: 5",
    "evaluate.prompts: 64",
    "evaluate.seeds: 2",
    "evaluate.rewards: [clipscore, pickscore, hpsv2]",
    "evaluate.stop_after: null",
)
"""YAML of all arms of the test of `fast` on FLUX.1."""
DECISIVE: Mapping[str, tuple[str, Sequence[str]]] = {
    "fast": ("fast", ()),
    "plain": ("diffusionnft", ("optimizer.updates=6", "optimizer.cosine_iterations=all")),
    "small": (
        "diffusionnft",
        (
            "optimizer.updates=2",
            "algorithm.beta=0.1",
            "policy.decay_flat=37",
            "policy.decay_rate=0.015",
            "policy.decay_max=0.999",
        ),
    ),
}
"""Arm of that test → its recipe, and its settings. `small` is DiffusionNFT's `sd3_ocr`, whose decay counts optimiser
steps, two an iteration.
"""
DECISIVE_SEEDS = 3


def figures(read: Read) -> dict[str, Any]:
    """Figures that take several results, by their names in the templates."""
    tables, beside = read("paper")["tables"], read("peers")["rows"]
    learned = [row for row in beside if row["part"] == "learning"]
    older = [row for row in learned if row["seed"] < FRESH]
    return {
        **_ranks(read),
        **_hacking(tables["hacking"]),
        **_times(read),
        "fast": _fast(read("fast")),
        "long_runs": _plateaus(tables["plateaus"]["gains"]),
        "peers": _peers(beside),
        "engines": _engines(read("engines")["rows"]),
        "learning": {
            peer: _learning([row for row in older if row["beside"] == peer])
            for peer in dict.fromkeys(row["beside"] for row in older)
        },
        "beginnings": {
            (span.peer, span.first): {"is": span, "difference": asdict(span.difference)}
            for span in spans([row for row in learned if row["seed"] >= FRESH])
        },
        "quick": list(halves([row for row in beside if row["part"] == "learning, fast"])),
        "beside_peers": {
            "prompts": WORDS[len(PROMPTS)],
            "samples": SAMPLES,
            "rate": LEARNINGS["diffusionnft"].learning_rate,
            "levels": LEARNINGS["diffusionnft"].timestep_fraction,
            "margin": MARGIN,
        },
        "same_draws": _same_draws([row for row in beside if row["part"] == "learning, same draws"]),
    }


def _peers(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Model, recipe and trainer → the rows of its timed parts."""
    timed: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in rows:
        if not row["part"].startswith("learning"):
            parts = timed.setdefault((row["model"], row["recipe"], row["trainer"]), {})
            parts[row["part"]] = row | {"facts": facts_of(row)}
    return timed


def _engines(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """Engine and precision → its candidates per second with an adapter and without, its version, its attention if
    stored, and the share of FLOPs in this precision.
    """
    return {
        (row["engine"].split()[0], row["precision"].partition(":")[0]): {
            "rate": CHUNK / statistics.median(row["adapted"]),
            "base": CHUNK / statistics.median(row["base"]),
            "version": row["engine"].partition(" ")[2],
            "attention": "".join(re.findall(r"attention by (\w+)", row["precision"])),
            "share": f"{share[1]} %" if (share := re.search(r"(\d+)% of", row["precision"])) else "all",
        }
        for row in rows
    }


def _learning(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Trainings beside a peer's, by means of five turns: which fall below their start, what all others gain, and theirs
    less ours with the interval over seeds. Shorter trainings count in the differences alone.
    """
    curves = [
        [
            [float(np.mean(row["rewards"][end - TURNS : end])) for end in range(TURNS, len(row["rewards"]) + 1, TURNS)]
            for row in rows
            if (row["trainer"] == "ours") == ours
        ]
        for ours in (True, False)
    ]
    longest = max(map(len, curves[0]))
    ours, theirs = ([run for run in runs if len(run) == longest] for runs in curves)
    spans = [np.array([[run[at] for run in runs if len(run) > at] for runs in curves]) for at in range(longest)]
    fallen = [[(run[0], run[-1]) for run in runs if run[-1] < run[0]] for runs in (ours, theirs)]
    return {
        "seeds": len(ours),
        "fallen": dict(zip(("ours", "theirs"), fallen, strict=True)),
        "gain": statistics.mean(run[-1] - run[0] for runs in (ours, theirs) for run in runs if run[-1] >= run[0]),
        "differences": [
            asdict(mean)
            | {"width": mean.high - mean.low}
            | {"turns": f"{TURNS * at + 1} to {TURNS * (at + 1)}", "decided": not mean.low <= 0 <= mean.high}
            | dict(zip(("ours", "theirs"), of_trainers.mean(1), strict=True))
            for at, of_trainers in enumerate(spans)
            for mean in (over_seeds(of_trainers[1] - of_trainers[0]),)
        ],
    }


def _same_draws(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Trainings in which a peer has our random draws: means of the first and of the last turns."""
    curves = {"ours" if row["trainer"] == "ours" else "theirs": row["rewards"] for row in rows}
    return {
        "turns": len(curves["ours"]),
        "fallen": {
            name: (statistics.mean(rewards[:TURNS]), statistics.mean(rewards[-TURNS:]))
            for name, rewards in curves.items()
        },
    }


def _fast(stored: Mapping[str, Any]) -> dict[str, Any]:
    rows = [row for row in stored["rows"] if row["stage"] == "confirm"]
    before = of_recipes([row for row in stored["rows"] if row["stage"] == "confirm, before"])
    of_stage = of_recipes(rows)
    pooled = of_stage.pop(POOLED)
    first = {row["seed"] for row in rows if row["arm"] == ALL}
    falls, rest = of_stage[FALLS], [arms for world, arms in of_stage.items() if world != FALLS]
    names = {
        FAST: "fast",
        BASELINE: "base",
        STEEP: "steep",
        ALL: "all",
        PLAIN: "twelve",
        UNEXPLORED: "four",
        SOL_RL: "sol_rl",
    }
    return {
        **{name: pooled[arm] | {"speed_up": pooled[arm]["time"]["flux"]["90%"]} for arm, name in names.items()},
        "before": before[POOLED][FAST]["time"]["flux"]["90%"],
        "settings": FAST_UPDATE,
        "steps": _steps(rows),
        "smoothed": _smoothed(rows),
        "decisive": _decisive(rows, by_preset(pooled[FAST])["mean"]),
        "later": of_recipes([row for row in rows if row["seed"] not in first])[POOLED][FAST]["time"]["flux"]["90%"],
        "without_words": of_recipes([row for row in rows if ", ocr" not in row["world"]])[POOLED][FAST]["time"]["flux"][
            "90%"
        ],
        "evaluated": _evaluated(by_preset(pooled[FAST])),
        "updates": {
            "here": WORDS[experiment(CONFIRM, CONFIRM.worlds[0], BASELINE, 201).config.optimizer.updates],
            "preset": WORDS[_plain_run("flux").optimizer.updates],
        },
        "awm": _awm(of_recipes([row for row in stored["rows"] if row["stage"] == AWM_STAGE])),
        "higher": {world: _higher([row for row in rows if row["world"] == world]) for world in of_stage},
        "judged": {
            world: span(
                max(zip(gains(row), gains(row, 1), strict=True), key=lambda at: at[0][1])[1][1]
                for row in rows
                if row["arm"] == SOL_RL and row["world"] == world
            )
            for world in of_stage
            if world.startswith(("mini-sd3", "mini-flux"))
        },
        "times_as_long": round(pooled[SOL_RL]["seconds"] / preset_seconds()),
        "changes": _changes([row for row in stored["rows"] if row["stage"] == CHANGES_STAGE]),
        "six_steps": by_preset(pooled[FAST]),
        "six_over": {
            names[arm]: pooled[arm]["over"]["90%"]["mean"] * pooled[FAST]["seconds"] / preset_seconds()
            for arm in (ALL, PLAIN)
        },
        "screens": Counter(
            world
            for stage, world in {(row["stage"], row["world"]) for row in stored["rows"]}
            if stage.startswith("screen") and stage != CHANGES_STAGE
        ),
        "stopped": {
            "patience": PATIENCE,
            "lowest": min(pooled[FAST]["kept"]),
            "number": sum(share < 1 for share in pooled[FAST]["kept"]),
        },
        "worlds": {
            world: arms[FAST]["time"]["flux"]
            | {"best": arms[FAST]["best"], "runs": arms[FAST]["runs"], "six steps": by_preset(arms[FAST])}
            | {names[arm]: arms[arm] for arm in (PLAIN, UNEXPLORED)}
            for world, arms in of_stage.items()
        },
        "clock": {shape: run["clock"] for shape, run in stored["loop"].items()},
        "start": stored["loop"]["flux"]["start"],
        "hours": {
            shape: {
                "iteration": seconds_of_iteration(run, shape),
                "run": hours_of_run(run, shape),
            }
            for shape, run in ((shape, fast_run(shape)) for shape in SHAPES)
        },
        "ends": {
            "fast": span(falls[FAST]["ends"]),
            "base": span(falls[BASELINE]["ends"]),
            "sol_rl": span(falls[SOL_RL]["ends"]),
            "base elsewhere": span(end for arms in rest for end in arms[BASELINE]["ends"]),
            "rest": f"{min(end for arms in rest for end in arms[FAST]['ends']):.2f}",
        },
        "aim": {
            "as run": _aim({world: arms[FAST]["time"]["flux"]["90%"] for world, arms in of_stage.items()}),
            "six steps": _aim({world: by_preset(arms[FAST]) for world, arms in of_stage.items()}),
        },
    }


def _smoothed(rows: Sequence[Mapping[str, Any]]) -> str:
    """How much lower best gains are, in the mean of an arm in a world, if each evaluation is averaged with those before
    and after it.
    """
    lower: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        curve = [gain for _, gain in gains(row)][1:]
        means = [statistics.mean(curve[max(at - 1, 0) : at + 2]) for at in range(len(curve))]
        lower.setdefault((row["world"], row["arm"]), []).append(max(curve) - max(means))
    return span(map(statistics.mean, lower.values()))


def _decisive(rows: Sequence[Mapping[str, Any]], mean: float) -> dict[str, Any]:
    """The test of `fast` on FLUX.1: settings of all arms, arms, hours of all seeds, those of `fast`, and the lower end
    of the interval of this mean, with the spread over seeds of each miniature.
    """
    hours = {}
    for arm, (recipe, settings) in DECISIVE.items():
        precision = ["explore.precision=fp8"] if recipe == "fast" else []
        every = [setting.replace(": ", "=", 1) for setting in TOGETHER]
        run = resolve(f"{PRESETS['flux']}/{recipe}/imagereward", overrides=[*every, *precision, *settings]).config
        hours[arm] = DECISIVE_SEEDS * hours_of_run(run, "flux")
    quantile = student.ppf(0.975, DECISIVE_SEEDS - 1) / math.sqrt(DECISIVE_SEEDS)
    spreads = [
        statistics.stdev(math.log(ratio(run, base, 0.9)) for run, base in paired(of_world, FAST))
        for world in dict.fromkeys(row["world"] for row in rows)
        for of_world in ([row for row in rows if row["world"] == world],)
    ]
    return {
        "together": TOGETHER,
        "arms": DECISIVE,
        "hours": sum(hours.values()),
        "again": hours["fast"],
        "lower": span((mean / math.exp(quantile * spread) for spread in spreads), 1),
    }


def _aim(speed_ups: Mapping[str, Interval]) -> str:
    """On which miniatures the interval of a speed-up lies above the highest that the paper has, below it, or around."""
    aim, minis = SPEED_UP[1], dict[str, list[str]]()
    for world, each in speed_ups.items():
        verdict = "reached" if each["low"] >= aim else "missed" if each["high"] < aim else "undecided"
        minis.setdefault(verdict, []).append(world.split(",")[0])
    return ", ".join(f"{said} on {series(on) if len(on) < 3 else WORDS[len(on)]}" for said, on in minis.items())


def _steps(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What each step from the baseline to `fast` multiplies the speed by, to 90 %, in runs of the seeds that all have:
    the update's cheaper iterations and its learning, fewer samples, exploring. 4-in-4 often falls short, so `fewer` is
    at most, `exploring` at least so much.
    """
    seeds = {row["seed"] for row in rows if row["arm"] == ALL}
    arms = of_recipes([row for row in rows if row["seed"] in seeds])[POOLED]
    update, fewer, whole = (arms[arm]["time"]["flux"]["90%"] for arm in (ALL, UNEXPLORED, FAST))
    cheaper = arms[BASELINE]["seconds"] / arms[ALL]["seconds"]
    return {
        "cheaper": cheaper,
        "learning": over(update, cheaper),
        "fewer": fewer["mean"] / update["mean"],
        "short": f"{arms[UNEXPLORED]['short']} of {arms[UNEXPLORED]['runs']}",
        "exploring": whole["mean"] / fewer["mean"],
        "whole": whole,
    }


def _evaluated(speed_up: Interval) -> dict[str, Any]:
    """Speed-up of FLUX.1's preset `fast` if both it and the baseline also evaluate as that preset does, and the seconds
    that this adds to an iteration, by the sums of `layout`.
    """
    run = fast_run("flux")
    fast, base = (seconds_of_iteration(each, "flux") for each in (run, _plain_run("flux")))
    seconds = hours_of_run(run, "flux") * 3600 / run.iterations - fast
    return {"seconds": seconds, "speed_up": over(speed_up, (1 + seconds / fast) / (1 + seconds / base))}


def _awm(of_stage: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Miniature → speed-ups of `fast` as it was, and of the AWM arm that is fastest over both miniatures."""
    speed = {
        world.split(",")[0]: {arm: each["time"]["flux"]["90%"]["mean"] for arm, each in arms.items()}
        for world, arms in of_stage.items()
        if world != POOLED
    }
    arms = [arm for arm in next(iter(speed.values())) if arm.startswith("AWM")]
    best = max(arms, key=lambda arm: statistics.geometric_mean(each[arm] for each in speed.values()))
    return {world: {"awm": each[best], "fast": each[EARLIER_FAST]} for world, each in speed.items()}


def _higher(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Best gain of Sol-RL less that of `fast` with the same seed, in one world."""
    best = {arm: {row["seed"]: height(row) for row in rows if row["arm"] == arm} for arm in (SOL_RL, FAST)}
    return asdict(over_seeds(np.array([gain - best[FAST][seed] for seed, gain in best[SOL_RL].items()])))


def _changes(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Changes of `fast`: their number, and their times over that of `fast`."""
    arms = {arm: pairs for arm, pairs in beside_fast(rows).items() if arm != FAST}
    return {
        "number": WORDS[len(arms)],
        "times": span(times_as_long(pairs) for pairs in arms.values()),
    }


def _plain_run(shape: str, *changes: str) -> RunConfig:
    """Settings of the simplest recipe, with as many prompts as `fast`."""
    return resolve(f"{PRESETS[shape]}/diffusionnft/imagereward", overrides=["explore.prompts=12", *changes]).config


def _ranks(read: Read) -> dict[str, str]:
    """Ranks in NVFP4, by the layers of large models."""
    rows = [row for row in read("family_lists/rank_fidelity")["rows"] if row["precision"] == "nvfp4"]
    return {
        "families_nvfp4": span(row["spearman"] for row in rows),
        "best_nvfp4": span((row["top_rank"] for row in rows), 0),
        "worst_nvfp4": span((row["bottom_rank"] for row in rows), 0),
        "chance": f"{(1 + 96) / 2:g}",
    }


def _plateaus(gains: Mapping[str, Any]) -> list[dict[str, str]]:
    """Rows of the long runs: their best gain in sd, its iteration, and their end in sd and as a share of their best."""
    rows = []
    for name, gain in gains.items():
        arm, _, reward = name.partition(", ")
        rows.append(
            {
                "run": f"{arm}, {TITLES[reward]}",
                "height": f"{gain['best, sd']['mean']:.2f}",
                "best": f"{gain['at iteration']:.0f}",
                "end": signed(gain["end, sd"]),
                "share": f"{100 * gain['end, sd']['mean'] / gain['best, sd']['mean']:.0f} %".replace("-", "−"),
            }
        )
    return rows


def _hacking(table: Mapping[str, Any]) -> dict[str, str]:
    gains = table["gains"]
    return {
        "fell": WORDS[sum(judges["fell"] != "none" for judges in gains.values())],
        "judge": span(judges["judge"]["mean"] for name, judges in gains.items() if name.endswith("Sol-RL")),
    }


def _times(read: Read) -> dict[str, str]:
    rows = read("equal_gpus")["rows"]
    one_gpu = {(row["model"], row["part"]): row["s"] for row in rows if row["gpus"] == 1}
    whole = [
        (one_gpu[model, "naive"] + one_gpu[model, "training"]) / (one_gpu[model, "sol_rl"] + one_gpu[model, "training"])
        for model in MODELS
    ]
    equal = [one_gpu[model, "naive"] / one_gpu[model, "sol_rl"] for model in MODELS]
    runs = read("true_run")["runs"].values()
    sent = [100 * run["medians"]["push"] / run["wall"] for run in runs]
    return {
        "phase_equal": f"{series(equal)} ×",
        "whole": f"{series(whole)} ×",
        "sync": f"{span(sent, 1)} %",
    }
