"""Figures of the pages of evidence: filters that say them, and those that take several results, by their names."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from fast.arms import BASELINE, FAST
from fast.page import POOLED
from fast.page import figures as of_recipes

Read = Callable[[str], Any]
"""Content of a stored result by its name, the path in benchmarks/results without `.json`."""
Interval = Mapping[str, float]
"""A mean with its limits, as paper.json has it."""
MODELS = ("flux", "sd3", "sana")
WORDS = ("none", "one", "two", "three", "four")


def span(values: Iterable[float], digits: int = 2) -> str:
    """The smallest and the largest of some values."""
    found = sorted(values)
    low, high = (f"{one:.{digits}f}".replace("-", "−") for one in (found[0], found[-1]))
    return low if low == high else f"{low} to {high}"


def points(shares: Iterable[float], digits: int = 1) -> str:
    """The smallest and the largest of some shares, in percentage points."""
    return span((100 * share for share in shares), digits)


def series(values: Iterable[float], digits: int = 2) -> str:
    """Some values, one after the other."""
    *first, last = (f"{one:.{digits}f}" for one in values)
    return f"{', '.join(first)} and {last}"


def signed(one: Interval | float, digits: int = 2) -> str:
    """A figure with its sign, and with its interval if it has one."""
    if not isinstance(one, Mapping):
        return f"{one:+.{digits}f}".replace("-", "−")
    return f"{signed(one['mean'], digits)} [{signed(one['low'], digits)}, {signed(one['high'], digits)}]"


def plain(one: Interval, sign: int = 1) -> str:
    """A mean with its interval, without a plus; −1 turns a change into a loss."""
    low, high = sorted((sign * one["low"], sign * one["high"]))
    return f"{sign * one['mean']:.3f} [{low:.3f}, {high:.3f}]".replace("-", "−")


def share(one: Interval, digits: int = 1) -> str:
    """A share with its interval, in per cent."""
    mean, low, high = (f"{100 * one[name]:.{digits}f}".replace("-", "−") for name in ("mean", "low", "high"))
    return f"{mean} % [{low}, {high}]"


def percent(share: float, digits: int = 0) -> str:
    """A share in per cent."""
    return f"{100 * share:.{digits}f} %"


def times(one: Interval | None) -> str:
    """A ratio with its interval, or that not all runs reach the reward."""
    return f"{one['mean']:.2f} × [{one['low']:.2f}, {one['high']:.2f}]" if one else "not by all seeds"


def over(one: Interval, cost: float) -> dict[str, float]:
    """A ratio of iterations as one of compute, where an iteration costs so many of the other's."""
    return {name: one[name] / cost for name in ("mean", "low", "high")}


def inverse(one: Interval) -> dict[str, float]:
    """The ratio the other way round."""
    return {"mean": 1 / one["mean"], "low": 1 / one["high"], "high": 1 / one["low"]}


def uneven(shares: Sequence[float]) -> float:
    """The largest distance of a share from their mean, over the mean."""
    return max(abs(one / statistics.mean(shares) - 1) for one in shares)


def p99(values: Sequence[float]) -> float:
    """The 99th percentile."""
    return float(np.percentile(values, 99))


FILTERS = (span, points, series, signed, plain, share, percent, times, over, inverse, uneven, p99, statistics.median)


def figures(read: Read) -> dict[str, Any]:
    """Figures that take several results, by their names in the templates."""
    tables = read("paper")["tables"]
    return {
        **_ranks(read),
        **_algorithms(tables["algorithms"], tables["authors"]["gains"]),
        **_plateaus(tables["plateaus"]["gains"]),
        **_sweeps(tables["sweeps"]),
        **_hacking(tables["hacking"]),
        **_times(read),
        "fast": _fast(read("fast")),
    }


def _fast(stored: Mapping[str, Any]) -> dict[str, Any]:
    of_stage = of_recipes([row for row in stored["rows"] if row["stage"] == "confirm"])
    pooled = of_stage.pop(POOLED)
    falling = of_stage["mini-sd3, hpsv2"]
    return {
        "pooled": {arm: each | {"time": each["time"]["flux"]["90%"]} for arm, each in pooled.items()},
        "worlds": {
            world: arms[FAST]["time"]["flux"] | {"best": arms[FAST]["best"]} for world, arms in of_stage.items()
        },
        "loop": stored["loop"]["flux"]["clock"] / stored["loop"]["flux"]["prompts"],
        "end": span(falling[FAST]["ends"]),
        "base_end": span(falling[BASELINE]["ends"]),
        "kept": min(pooled[FAST]["kept"]),
    }


def _ranks(read: Read) -> dict[str, str]:
    found = {}
    for name, path in (
        ("ranks", "rank_fidelity"),
        ("families", "family_lists/rank_fidelity"),
        ("unprepared", "unprepared/rank_fidelity"),
    ):
        rows = [one for one in read(path)["rows"] if "/prepared/" not in one["model"]]
        for precision in {one["precision"] for one in rows}:
            own = [one for one in rows if one["precision"] == precision]
            found[f"{name}_{precision}"] = span(one["spearman"] for one in own)
            found[f"{name}_kendall_{precision}"] = span(one["kendall"] for one in own)
            if name == "ranks":
                found[f"best_{precision}"] = span((one["top_rank"] for one in own), 0)
                found[f"worst_{precision}"] = span((one["bottom_rank"] for one in own), 0)
    group, side = 96, 12
    found["perfect"] = f"{(1 + side) / 2:g} and {group - (side - 1) / 2:g}"
    return found | {"chance": f"{(1 + group) / 2:g}"}


def _algorithms(table: Mapping[str, Any], authors: Mapping[str, Any]) -> dict[str, str]:
    again = [100 * table["spent"][name]["recomputed"] for name in ("FlowGRPO", "DanceGRPO")]
    near = [table["gains"][name] for name in ("AWM", "DiffusionNFT", "Sol-RL")]
    shares = [
        100 * one[f"{reward}: final, gain"][1]["mean"] / most
        for one in near
        for reward, most in table["ceiling"].items()
    ]
    less = {name: one["Sol-RL less it"] for name, one in authors.items()}
    return {
        "recomputed": span(again, 0),
        "ceiling_share": span(shares, 0),
        **{
            f"authors_{name.lower()}": span((one["mean"] for key, one in less.items() if name in key), 3)
            for name in ("FlowGRPO", "DanceGRPO")
        },
        "authors_ahead": f"{sum(one['low'] > 0 for one in less.values())} of {len(less)}",
    }


def _plateaus(gains: Mapping[str, Any]) -> dict[str, str]:
    families = {"small": "24-in-24 BF16", "bf16": "24-in-96 BF16", "ours": "Sol-RL"}
    grown = {
        (large, figure): span(
            (one[figure][1] / one[figure][0] for row, one in gains.items() if row.startswith("24-in-24") != large),
            digits,
        )
        for large in (False, True)
        for figure, digits in (("gradient norm", 0), ("loss", 1))
    }
    return {
        "gradients_small": grown[False, "gradient norm"],
        "gradients_large": grown[True, "gradient norm"],
        "losses_small": grown[False, "loss"],
        "losses_large": grown[True, "loss"],
    } | {
        f"{at}_{key}": series(
            round(one[f"{at}, sd"]["mean"], 2) + 0 for row, one in gains.items() if row.startswith(name)
        )
        for at in ("best", "end")
        for key, name in families.items()
    }


def _sweeps(table: Mapping[str, Any]) -> dict[str, str]:
    clear = [name for name, one in table["differences"].items() if one["p"] < 0.05]
    rates = table["matches"]
    misses = [100 * (measured - predicted) for row in rates.values() for measured, predicted in row.values()]
    return {
        "clear": WORDS[len(clear)],
        "clear_sizes": " and ".join(sorted({name.split(",")[0] for name in clear})),
        "misses": span(misses, 0),
        "match_settings": str(len(misses)),
        "matches": f"{series((100 * measured for measured, _ in rates['96'].values()), 0)} %",
    }


def _hacking(table: Mapping[str, Any]) -> dict[str, str]:
    gains, equal = table["gains"], table["at equal reward"]
    every = [one["mean"] for judges in gains.values() for one in judges.values() if isinstance(one, Mapping)]
    return {
        "fell": WORDS[sum(judges["fell"] != "none" for judges in gains.values())],
        "lowest": signed(min(every)),
        "judge": span(judges["judge"]["mean"] for name, judges in gains.items() if name.endswith("Sol-RL")),
        "judged_equally": series((equal["mean of all"][name] for name in ("24-in-24 BF16", "Sol-RL", "AWM")), 3),
    }


def _times(read: Read) -> dict[str, str]:
    phases, rows = read("rollout_phase")["models"], read("equal_gpus")["rows"]
    one_gpu = {(row["model"], row["part"]): row["s"] for row in rows if row["gpus"] == 1}
    whole = [
        (one_gpu[model, "naive"] + one_gpu[model, "training"]) / (one_gpu[model, "sol_rl"] + one_gpu[model, "training"])
        for model in MODELS
    ]
    equal = [one_gpu[model, "naive"] / one_gpu[model, "sol_rl"] for model in MODELS]
    phase = [
        one["baseline"]["s"] / (one["6 steps"]["s"] + one["regenerate"]["s"])
        for one in (phases[model]["phase"] for model in MODELS)
    ]
    runs = read("true_run")["runs"].values()
    sent = [100 * run["medians"]["push"] / run["wall"] for run in runs]
    return {
        "phase": f"{series(phase)} ×",
        "phase_equal": f"{series(equal)} ×",
        "whole": f"{series(whole)} ×",
        "sync": f"{span(sent, 1)} %",
        "sync_median": f"{statistics.median(sent):.1f} %",
        "sync_prompts": span((run["prompts"] for run in runs), 0),
    }
