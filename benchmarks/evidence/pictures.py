"""Pictures of the evidence pages, in the house style of the reports, from stored results."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from evidence.claims import MODELS, Read
from fast.page import gains
from paper.intervals import over_seeds
from solrl_trainer.report import style

NAMES = {"flux": "FLUX.1 512²", "sd3": "SD3.5-Large 1024²", "sana": "SANA 1.6B 1024²"}
RECIPES = {
    "24-in-24, β 1": "24 drawn, 24 trained",
    "best plain": "best without exploring",
    "Sol-RL as published": "Sol-RL as published",
    "fast": "fast",
}
FAMILIES = {"24-in-24 BF16": "24 in 24, BF16", "24-in-96 BF16": "24 in 96, BF16", "Sol-RL": "Sol-RL"}


def write(figure: Any, path: Path) -> None:
    """Write a figure as SVG, in colours for a light or a dark page."""
    shades = [";".join(f"--{name}:{pair[dark]}" for name, pair in style.COLOURS.items()) for dark in (0, 1)]
    rules = f":root{{{shades[0]}}}@media(prefers-color-scheme:dark){{:root{{{shades[1]}}}}}"
    head, _, rest = style.svg(figure).partition(">")
    head = head.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"')
    path.write_text(f"{head}><style>{rules}</style>{rest}\n", encoding="utf-8")


def speed(read: Read, path: Path) -> None:
    """Bars of one prompt's rollout phase, with their seconds and the speed-up over naive scaling at their ends."""
    found = {(row["model"], row["part"]): row for row in read("equal_gpus")["rows"] if row["gpus"] == 1}
    parts = {"naive": "naive scaling", "sol_rl": "six steps", "sol_rl, 4 fitted steps": "four fitted steps"}
    with style.figure(800, 330) as figure:
        panels = figure.subplots(1, len(MODELS))
        for model, axes in zip(MODELS, panels, strict=True):
            naive = found[model, "naive"]["s"]
            for at, part in enumerate(parts):
                row = found[model, part]
                explored = axes.barh(at, row["explore"], color="C2")
                again = axes.barh(at, row["regenerate"], left=row["explore"], color="C1")
                times = f", {naive / row['s']:.2f} ×" if at else ""
                _beside(axes, f"{row['s']:.1f} s{times}", (row["s"], at), fontweight="bold")
            axes.set(title=NAMES[model], xlabel="seconds", xlim=(0, 1.25 * naive), yticks=range(len(parts)))
            axes.set_yticklabels(parts.values() if model == MODELS[0] else [])
            axes.invert_yaxis()
            axes.grid(axis="y", visible=False)
        figure.legend([explored, again], ["explore", "regenerate"], loc="outside lower center", ncols=2)
        write(figure, path)


def training(read: Read, path: Path) -> None:
    """Dots of strict accuracy before and after training, a row for each pair of miniature and reward."""
    pairs: Sequence[Mapping[str, Any]] = read("all_pairs")
    with style.figure(800, 360) as figure:
        axes = figure.subplots()
        for at, pair in enumerate(pairs):
            before, after = pair["strict_before"], pair["strict_after"]
            axes.plot([before, after], [at, at], color="C7", linewidth=1.5, zorder=1)
            axes.plot(before, at, "o", color="C7", label="before" if not at else None)
            axes.plot(after, at, "o", color="C0", label="after" if not at else None)
            _beside(axes, f"+{after - before:.0f}{'' if at else ' points'}", (after, at), gap=8, fontsize=9)
        axes.set(yticks=range(len(pairs)), xlabel="images that show exactly what their prompt says")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f} %")
        axes.set_yticklabels([f"{pair['model']}, {pair['reward']}" for pair in pairs])
        axes.set_xlim(40, 84)
        axes.grid(axis="y", visible=False)
        axes.invert_yaxis()
        axes.legend(loc="lower right")
        write(figure, path)


def plateaus(read: Read, path: Path) -> None:
    """Mean learning curves of the long runs with their intervals over seeds, a panel for each reward."""
    curves = read("paper")["tables"]["plateaus"]["curves"]
    rewards = list(dict.fromkeys(name.rpartition(", ")[2] for name in curves))
    with style.figure(800, 330) as figure:
        panels = figure.subplots(1, len(rewards), sharey=True)
        for reward, axes in zip(rewards, panels, strict=True):
            for name, said in FAMILIES.items():
                iterations, gains, *limits = zip(*curves[f"{name}, {reward}"], strict=True)
                (line,) = axes.plot(iterations, gains, label=said if reward == rewards[0] else None)
                axes.fill_between(iterations, *limits, color=line.get_color(), alpha=0.15, linewidth=0)
            axes.set(title=f"trained on {reward}", xlabel="iterations")
        panels[0].set_ylabel("gain of the held-out reward, sd")
        figure.legend(loc="outside lower center", ncols=len(FAMILIES))
        write(figure, path)


def recipes(read: Read, path: Path) -> None:
    """Mean held-out gains of the confirmed recipes over GPU hours of FLUX.1 with intervals, a panel for each world."""
    rows = [row for row in read("fast")["rows"] if row["stage"] == "confirm"]
    worlds = list(dict.fromkeys(row["world"] for row in rows))
    with style.figure(800, 500) as figure:
        panels, lines = figure.subplots(2, 2, sharex=True), {}
        for world, axes in zip(worlds, panels.flat, strict=True):
            for at, (arm, said) in enumerate(RECIPES.items()):
                curves = [gains(row) for row in rows if (row["world"], row["arm"]) == (world, arm)]
                if not curves:
                    continue
                of_iteration = next(row["seconds"]["flux"] for row in rows if row["arm"] == arm) / 3600
                hours = [of_iteration * version for version, _ in curves[0]][1:]
                means = [over_seeds(np.array([curve[i][1] for curve in curves])) for i in range(1, len(curves[0]))]
                (lines[said],) = axes.plot(hours, [mean.mean for mean in means], color=f"C{at}")
                limits = [mean.low for mean in means], [mean.high for mean in means]
                axes.fill_between(hours, *limits, color=f"C{at}", alpha=0.15, linewidth=0)
            axes.set(title=world.replace("ocr", "OCR"), xscale="log", ylim=(0, None))
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.set_xticks([0.1, 0.3, 1, 3, 10])
            axes.minorticks_off()
        for axes in panels[1]:
            axes.set_xlabel("hours of one H200 for as many FLUX.1 samples")
        for axes in panels[:, 0]:
            axes.set_ylabel("gain of the held-out reward, sd")
        figure.legend(
            [lines[said] for said in RECIPES.values()], RECIPES.values(), loc="outside lower center", ncols=len(RECIPES)
        )
        write(figure, path)


def plans(read: Read, path: Path) -> None:
    """Loss in rank over the steps spent in FP8, of the worst of three miniatures, a line for each way to prune."""
    rows = [row for row in read("refitted/plan_fidelity")["rows"] if row["decoded"] == "whole" and row["cost"] < 1]
    lost: dict[tuple[int, int], dict[tuple[float, int], dict[str, list[float]]]] = {}
    for row in rows:
        points = lost.setdefault((row["steps"], row["after"]), {})
        worse = max(mean for mean, _, _ in row["worse"].values())
        points.setdefault((row["cost"], row["keep"]), {}).setdefault(row["model"], []).append(worse)
    with style.figure(800, 340) as figure:
        axes = figure.subplots()
        for at, ((steps, after), points) in enumerate(lost.items()):
            pruned = f", pruned after {after}" if after < steps else ""
            name = f"{'six' if steps == 6 else 'four fitted'} steps{pruned}"
            found = [(*point, max(map(fmean, models.values()))) for point, models in points.items()]
            axes.plot([cost for cost, _, _ in found], [loss for *_, loss in found], "o-", color=f"C{at}", label=name)
            # Six steps pruned after two lie above the others: the numbers of one line keep away from the next.
            above = {"xytext": (5, 4)}
            below = {"xytext": (-5, -3), "ha": "right", "va": "top"}
            side: Mapping[str, Any] = above if steps < 6 or after == 2 else below
            for cost, keep, loss in found:
                axes.annotate(str(keep), (cost, loss), textcoords="offset points", fontsize=8, **side)
        axes.axhline(1, color="C7", linestyle="--", linewidth=1)
        axes.set(xlabel="cost of exploring, share of six steps", ylabel="ranks lost", ylim=(-0.5, 8))
        axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
        axes.legend(loc="upper right")
        write(figure, path)


def _beside(axes: Any, text: str, at: tuple[float, float], gap: float = 4, **style: Any) -> None:
    """Write to the right of a point, so many points away."""
    axes.annotate(text, at, xytext=(gap, 0), textcoords="offset points", va="center", **style)


PICTURES: Mapping[str, Callable[[Read, Path], None]] = {
    "speed.svg": speed,
    "training.svg": training,
    "plateaus.svg": plateaus,
    "plans.svg": plans,
    "recipes.svg": recipes,
}
"""File in docs/evidence → function that draws it."""
