"""Tables and plot for `rollout_phase.py`."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cold_start import SHARES

PARTS = ("transformer", "encode", "decode", "reward", "other")


def render(result: Mapping[str, Any], out: Path) -> str:
    """Write the tables and, if matplotlib is installed, the plot; return the tables."""
    text = table(result)
    (out / "rollout_phase.md").write_text(text)
    if "share" in result and importlib.util.find_spec("matplotlib"):
        plot(result["share"], out / "rollout_phase.png")
    return text


def table(result: Mapping[str, Any]) -> str:
    """Markdown tables of the measured parts, goals first."""
    setting = result.get("setting", {})
    lines = [
        "# Rollout phase, adapter update and cold start of FLUX.1",
        "",
        f"By `python benchmarks/rollout_phase.py` on one {setting.get('device', 'GPU')}: FLUX.1 at true size,",
        f"{setting.get('size', 512)}², with its text encoders and VAE, and HPSv2 with its CLIP ViT-H/14. The weights",
        "are random; time does not depend on them. Candidates are generated as in the service, without its queue and",
        f"HTTP: 24 at a time, scored in {setting.get('reward', 'float32')} while the next 24 are generated.",
        "",
        "| | measured | required | goal |",
        "|---|---|---|---|",
    ]
    lines += [f"| {name} | {value} | {reach} | {aim} |" for name, value, reach, aim in goals(result)]
    if "phase" in result:
        lines += ["", "## Rollout phase", "", "| | median, s | all rounds, s |", "|---|---|---|"]
        for name, row in result["phase"].items():
            each = ", ".join(f"{value:.2f}" for value in row["times"])
            lines.append(f"| {_description(name, setting)} | {row['s']:.2f} | {each} |")
    if "share" in result:
        lines += _share(result["share"])
    if "reward" in result:
        r = result["reward"]
        lines += [
            "",
            f"Scoring {r['candidates']} images takes {r['float32_s']:.3f} s in float32, and would take",
            f"{r['tf32_s']:.3f} s with products in TF32. Random weights cannot show the effect of TF32 on scores.",
        ]
    if "adapter" in result:
        lines += _adapter(result["adapter"])
    starts = [name for name in ("cold", "second start") if name in result]
    if starts:
        lines += ["", "## Start of a service", "", f"| s | {' | '.join(starts)} |", "|---|" + "---|" * len(starts)]
        for part in dict.fromkeys(part for name in starts for part in result[name]):
            values = [result[name].get(part, "") for name in starts]
            said = [f"{value:.1f}" if isinstance(value, float) else str(value) for value in values]
            lines.append(f"| {'**first candidate**' if part == 'first candidate' else part} | {' | '.join(said)} |")
        lines += [
            "",
            "Cold: with empty compile caches; the second start uses the caches of the first. The row of the first",
            "candidate is the sum of all rows above it, from the start of the process. The rows below it are the rest",
            "of the work before the service is ready (for the second start, only compiling was measured). Reading",
            "weights from disk is not included.",
        ]
    return "\n".join(lines) + "\n"


def goals(result: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """(quantity, measured, required, goal) of each measured quantity."""
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
        name = f"rank-32 adapter of {one['bytes'] / 1e6:.0f} MB from memory to served; recompiled graphs"
        rows.append((name, f"{one['whole']:.2f} s; {one['recompiled']}", "≤ 1.0 s; 0", "≤ 0.3 s; 0"))
    phase = result.get("phase", {})
    if {"explore", "regenerate", "baseline"} <= phase.keys():
        whole = phase["baseline"]["s"]
        for name in phase:
            if name.startswith("explore"):
                ratio = whole / (phase[name]["s"] + phase["regenerate"]["s"])
                speed_up = f"speed-up of the rollout phase over BF16, {name.partition(', ')[2] or 'unpruned'}"
                required, goal = ("≥ 2.0", "≥ 2.41") if "keep" in name else ("≥ 1.55", "")
                rows.append((speed_up, f"{ratio:.2f}", required, goal))
    if "share" in result:
        outside = result["share"]["outside"]["served"]
        rows.append(("share of exploration outside the transformer", f"{outside:.1%}", "≤ 10 %", "≤ 5 %"))
    if "regenerate" in result:
        one = result["regenerate"]
        outside = 1 - (one["parts"]["transformer"] + one["parts"]["decode"]) / one["served_s"]
        rows.append(("share of regenerating outside transformer and decoder", f"{outside:.1%}", "≤ 3 %", ""))
    return rows


def _description(name: str, setting: Mapping[str, Any]) -> str:
    cheap = str(setting.get("precision", "fp8")).upper()
    known = {
        "baseline": "baseline: 96 at 10 steps, compiled BF16",
        "regenerate": "regenerate: 24 at 10 steps, compiled BF16",
        "explore": f"explore: 96 at 6 steps, {cheap}",
    }
    return known.get(name) or name.replace("explore", known["explore"], 1)


def _share(share: Mapping[str, Any]) -> list[str]:
    alone = share["one_after_the_other_s"]
    each = ", ".join(f"{value:.2f}" for value in share["served_times"])
    return [
        "",
        "## Time of an exploration by part",
        "",
        f"With overlapped scoring, as in the service, an exploration takes {share['served_s']:.2f} s",
        f"(median of {each}).",
        f"The {share['passes']} passes of the transformer take {share['parts']['transformer']:.2f} s without overlap, "
        f"so {share['outside']['served']:.1%} of",
        f"the time is spent outside the transformer. Without overlap an exploration takes {alone:.2f} s,",
        f"{share['outside']['one_after_the_other']:.1%} of it outside the transformer:",
        "",
        "| | s | share |",
        "|---|---|---|",
        *(f"| {name} | {share['parts'][name]:.3f} | {share['parts'][name] / alone:.1%} |" for name in PARTS),
        "",
        "![Time of an exploration by part](rollout_phase.png)",
    ]


def _adapter(one: Mapping[str, Any]) -> list[str]:
    parts = " | ".join(f"{seconds:.3f}" for seconds in one["parts"].values())
    return [
        "",
        "## Adapter update",
        "",
        f"| {' | '.join(one['parts'])} | total |",
        "|---|" + "---|" * len(one["parts"]),
        f"| {parts} | {one['whole']:.3f} |",
        "",
        f"Seconds, medians of 3. {one['modules']} modules are merged in float32 and requantised in place. A chunk of",
        f"one step afterwards compiled {one['recompiled']} graphs.",
    ]


def plot(share: Mapping[str, Any], path: Path) -> None:
    """Plot the parts of an exploration without overlap as a stacked bar, and its time with overlap as a line."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 2.2), layout="constrained")
    left = 0.0
    for name in PARTS:
        seconds = share["parts"][name]
        axes.barh([0], [seconds], left=left, label=f"{name} {seconds / share['one_after_the_other_s']:.1%}")
        left += seconds
    axes.axvline(share["served_s"], color="0.3", linestyle="--", label="total with overlapped scoring")
    axes.set(xlabel="s, 96 candidates at 6 steps", yticks=[])
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)
