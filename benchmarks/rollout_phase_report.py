"""Tables and plot of `rollout_phase.py`."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cold_start import SHARES

PARTS = ("transformer", "encode", "decode", "reward", "other")


def render(result: Mapping[str, Any], out: Path) -> str:
    """Write the tables and, where matplotlib is installed, the plot; returns the tables."""
    text = table(result)
    (out / "rollout_phase.md").write_text(text)
    if "share" in result and importlib.util.find_spec("matplotlib"):
        plot(result["share"], out / "rollout_phase.png")
    return text


def table(result: Mapping[str, Any]) -> str:
    """What there is of each part, in Markdown; the goals first."""
    setting = result.get("setting", {})
    lines = [
        "# A rollout phase, an adapter's arrival, a cold start",
        "",
        f"By `python benchmarks/rollout_phase.py` on one {setting.get('device', 'GPU')}: FLUX.1 of true size,",
        f"{setting.get('size', 512)}², with its text encoders and VAE, and HPSv2 of its CLIP ViT-H/14's size. The",
        "weights are random: time does not depend on them. Candidates take the service's way, without its queue and",
        f"HTTP: 24 at a time, scored in {setting.get('reward', 'float32')} while the next are made.",
        "",
        "| | measured | reach | aim |",
        "|---|---|---|---|",
    ]
    lines += [f"| {name} | {value} | {reach} | {aim} |" for name, value, reach, aim in goals(result)]
    if "phase" in result:
        lines += ["", "## The rollout phase", "", "| | s, median | each |", "|---|---|---|"]
        for name, row in result["phase"].items():
            each = ", ".join(f"{value:.2f}" for value in row["times"])
            lines.append(f"| {_told(name, setting)} | {row['s']:.2f} | {each} |")
    if "share" in result:
        lines += _share(result["share"])
    if "reward" in result:
        r = result["reward"]
        lines += [
            "",
            f"Scoring {r['candidates']} images takes {r['float32_s']:.3f} s in float32, and would take",
            f"{r['tf32_s']:.3f} s with its products in TF32. What that does to scores, random weights do not tell.",
        ]
    if "adapter" in result:
        lines += _adapter(result["adapter"])
    starts = [name for name in ("cold", "second start") if name in result]
    if starts:
        lines += ["", "## A start", "", f"| s | {' | '.join(starts)} |", "|---|" + "---|" * len(starts)]
        for part in dict.fromkeys(part for name in starts for part in result[name]):
            values = [result[name].get(part, "") for name in starts]
            said = [f"{value:.1f}" if isinstance(value, float) else str(value) for value in values]
            lines.append(f"| {'**first candidate**' if part == 'first candidate' else part} | {' | '.join(said)} |")
        lines += [
            "",
            "Cold: with nothing compiled before; the second start finds what the first has compiled. The first",
            "candidate's row is of all above it, from the process's start; below it is what the service does besides",
            "before it is ready (of a second start only the compiling was measured). Reading weights from a disk is",
            "not in it.",
        ]
    return "\n".join(lines) + "\n"


def goals(result: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """(what, measured, within reach, aimed at) of all that was measured."""
    rows = []
    if "first candidate" in (cold := result.get("cold", {})):
        rows.append(
            ("cold start to the first scored candidates", f"{cold['first candidate']:.1f} s", "≤ 60 s", "≤ 30 s")
        )
    if SHARES in cold:
        ready = sum(seconds for part, seconds in cold.items() if part != "first candidate")
        rows.append(("cold start to ready", f"{ready:.1f} s", "", ""))
    if "adapter" in result:
        one = result["adapter"]
        name = f"rank-32 adapter of {one['bytes'] / 1e6:.0f} MB in memory → served; graphs compiled anew"
        rows.append((name, f"{one['whole']:.2f} s; {one['recompiled']}", "≤ 1.0 s; 0", "≤ 0.3 s; 0"))
    phase = result.get("phase", {})
    if {"explore", "regenerate", "baseline"} <= phase.keys():
        whole = phase["baseline"]["s"]
        for name in phase:
            if name.startswith("explore"):
                ratio = whole / (phase[name]["s"] + phase["regenerate"]["s"])
                told = f"rollout phase against BF16, {name.partition(', ')[2] or 'unpruned'}"
                reach, aim = ("≥ 2.0", "≥ 2.41") if "keep" in name else ("≥ 1.55", "")
                rows.append((told, f"{ratio:.2f}", reach, aim))
    if "share" in result:
        outside = result["share"]["outside"]["served"]
        rows.append(("share of exploring outside the transformer", f"{outside:.1%}", "≤ 10 %", "≤ 5 %"))
    return rows


def _told(name: str, setting: Mapping[str, Any]) -> str:
    cheap = str(setting.get("precision", "fp8")).upper()
    known = {
        "baseline": "the baseline: 96 at 10 steps, compiled BF16",
        "regenerate": "regenerate: 24 at 10 steps, compiled BF16",
        "explore": f"explore: 96 at 6 steps, {cheap}",
    }
    return known.get(name) or name.replace("explore", known["explore"], 1)


def _share(share: Mapping[str, Any]) -> list[str]:
    alone = share["one_after_the_other_s"]
    each = ", ".join(f"{value:.2f}" for value in share["served_times"])
    return [
        "",
        "## Where an exploration's time goes",
        "",
        f"With scoring beside, as it is served, it takes {share['served_s']:.2f} s (median of {each}), of which the "
        f"{share['passes']} passes of the",
        f"transformer, where nothing runs beside them, are {share['parts']['transformer']:.2f} s: "
        f"{share['outside']['served']:.1%} is outside. One thing after the other it takes",
        f"{alone:.2f} s, {share['outside']['one_after_the_other']:.1%} outside:",
        "",
        "| | s | share |",
        "|---|---|---|",
        *(f"| {name} | {share['parts'][name]:.3f} | {share['parts'][name] / alone:.1%} |" for name in PARTS),
        "",
        "![Where an exploration's time goes](rollout_phase.png)",
    ]


def _adapter(one: Mapping[str, Any]) -> list[str]:
    parts = " | ".join(f"{seconds:.3f}" for seconds in one["parts"].values())
    return [
        "",
        "## An adapter",
        "",
        f"| {' | '.join(one['parts'])} | whole |",
        "|---|" + "---|" * len(one["parts"]),
        f"| {parts} | {one['whole']:.3f} |",
        "",
        f"Seconds, medians of 3. {one['modules']} modules are merged in float32 and quantised anew, in place. A chunk",
        f"of one step after it compiled {one['recompiled']} graphs.",
    ]


def plot(share: Mapping[str, Any], path: Path) -> None:
    """One stacked bar of an exploration, one thing after the other, and how long it takes as it is served."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 2.2), layout="constrained")
    left = 0.0
    for name in PARTS:
        seconds = share["parts"][name]
        axes.barh([0], [seconds], left=left, label=f"{name} {seconds / share['one_after_the_other_s']:.1%}")
        left += seconds
    axes.axvline(share["served_s"], color="0.3", linestyle="--", label="whole, scored beside")
    axes.set(xlabel="s, 96 candidates at 6 steps", yticks=[])
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)
