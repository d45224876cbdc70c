"""Pictures of the evidence pages, in the house style of the reports, from stored results."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from evidence.claims import MODELS, Read
from evidence.formats import TITLES, times, titled
from fast.arms import ALL, BASELINE, FAST, PAPER, PLAIN, UNEXPLORED
from fast.cost import fast_run, seconds_of_prompt
from fast.page import figures as of_recipes
from fast.page import gains, height
from paper.intervals import over_seeds
from solrl_trainer.report import style

NAMES = {"flux": "FLUX.1 512²", "sd3": "SD3.5-Large 1024²", "sana": "SANA 1.6B 1024²"}
RECIPES = {
    FAST: ("fast, 4-in-24", "C0"),
    UNEXPLORED: ("not exploring, 4-in-4", "C3"),
    PLAIN: ("not exploring, 12-in-12", "C2"),
    ALL: ("not exploring, 24-in-24", "C4"),
    BASELINE: ("24-in-24, β 1", "C7"),
    PAPER: ("Sol-RL, 24-in-96", "C1"),
}
"""Arm → its name and its colour."""
FAMILIES = {
    "24-in-24 BF16": ("24-in-24", "C7"),
    "24-in-96 BF16": ("24-in-96, in BF16", "C2"),
    "Sol-RL": ("Sol-RL", "C1"),
}
WIDTH = 420
"""Points of a picture, little more than the pixels of a phone, so that labels can be read there."""
PLANS = {
    "four fitted steps": (4, 4, 96),
    "six steps, 48 go on after two": (6, 2, 48),
    "six steps, 48 go on after three": (6, 3, 48),
    "six steps, 64 go on after four": (6, 4, 64),
}
"""Name → steps, the step after which candidates are pruned, and how many remain."""


def write(figure: Any, path: Path) -> None:
    """Write a figure as SVG for light and dark pages; where CSS variables are unknown, it has the light colours."""
    shades = [";".join(f"--{name}:{pair[dark]}" for name, pair in style.COLOURS.items()) for dark in (0, 1)]
    rules = f":root{{{shades[0]}}}@media(prefers-color-scheme:dark){{:root{{{shades[1]}}}}}"
    head, _, rest = style.svg(figure).partition(">")
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    head = head.replace("<svg", f'<svg {names} width="{96 * figure.get_figwidth():.0f}"')
    rest = re.sub(r'style="[^"]*"', _with_fallback, rest)
    path.write_text(f"{head}><style>{rules}</style>{rest}\n", encoding="utf-8")


def _with_fallback(found: re.Match[str]) -> str:
    """The `style` of an element, after its colours as attributes, which count where `var()` is not understood."""
    light = [f'{name}="{style.COLOURS[shade][0]}"' for name, shade in re.findall(r"([a-z]+): var\(--(\w+)\)", found[0])]
    return " ".join([*light, found[0]])


def speed(read: Read, path: Path) -> None:
    """Bars of one prompt's iteration by phase; at their ends its seconds, and how fast it is beside naive scaling."""
    parts = {(row["model"], row["part"]): row for row in read("equal_gpus")["rows"] if row["gpus"] == 1}
    recipes = {
        "24-in-24": "24-in-24",
        "naive": "naive scaling:\n24-in-96, BF16",
        "sol_rl": "Sol-RL,\n24-in-96",
        "fast": "fast,\n4-in-24",
    }
    phases = {"explore": ("draw or explore", "C2"), "regenerate": ("regenerate", "C1"), "train": ("train", "C7")}
    with style.figure(WIDTH, 560) as figure:
        panels = figure.subplots(len(MODELS), 1)
        for model, axes in zip(MODELS, panels, strict=True):
            trained = parts[model, "training"]["s"]
            parts[model, "24-in-24"] = {phase: parts[model, "naive"][phase] / 4 for phase in ("explore", "regenerate")}
            parts[model, "fast"] = seconds_of_prompt(fast_run(model), model)
            naive = parts[model, "naive"]["s"] + trained
            for at, recipe in enumerate(recipes):
                row, total = {"train": trained} | parts[model, recipe], 0.0
                for phase, (said, colour) in phases.items():
                    axes.barh(at, row[phase], left=total, color=colour, label=None if at else said)
                    total += row[phase]
                times = f", {naive / total:.2f} ×" if recipe == "sol_rl" else ""
                _beside(axes, f"{total:.1f} s{times}", (total, at), fontweight="bold")
            axes.set(title=NAMES[model], xlim=(0, 1.25 * naive))
            axes.set_yticks(range(len(recipes)), recipes.values())
            axes.locator_params(axis="x", nbins=4)
            axes.invert_yaxis()
            axes.grid(axis="y", visible=False)
        panels[-1].set_xlabel("seconds of a prompt")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(phases))
        write(figure, path)


def training(read: Read, path: Path) -> None:
    """Dots of strict accuracy before and after training, a row for each pair of miniature and reward."""
    pairs: Sequence[Mapping[str, Any]] = read("all_pairs")
    with style.figure(WIDTH, 380) as figure:
        axes = figure.subplots()
        places = [place + 0.7 * (place // len({pair["reward"] for pair in pairs})) for place in range(len(pairs))]
        for at, pair in zip(places, pairs, strict=True):
            before, after = pair["strict_before"], pair["strict_after"]
            axes.plot([before, after], [at, at], color="C7", linewidth=1.5, zorder=1)
            axes.plot(before, at, "o", color="C7", label="before" if not at else None)
            axes.plot(after, at, "o", color="C0", label="after" if not at else None)
            _beside(axes, f"+{after - before:.0f}{'' if at else ' points'}", (after, at), gap=8, fontsize=9)
        axes.set(yticks=places, xlabel="held-out images that the verifier accepts")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f} %")
        axes.set_yticklabels([f"{pair['model']}, {TITLES[pair['reward']]}" for pair in pairs])
        axes.set(xlim=(40, 86), xticks=range(40, 90, 10))
        axes.grid(axis="y", visible=False)
        axes.invert_yaxis()
        axes.legend(loc="lower right")
        write(figure, path)


def plateaus(read: Read, path: Path) -> None:
    """Mean learning curves of the long runs with their intervals over seeds, a panel for each reward."""
    curves = read("paper")["tables"]["plateaus"]["curves"]
    rewards = list(dict.fromkeys(name.rpartition(", ")[2] for name in curves))
    with style.figure(WIDTH, 300) as figure:
        panels = figure.subplots(1, len(rewards), sharey=True)
        for reward, axes in zip(rewards, panels, strict=True):
            for name, (_, colour) in FAMILIES.items():
                iterations, means, *limits = zip(*curves[f"{name}, {reward}"], strict=True)
                _curve(axes, iterations, means, limits, colour)
            axes.set_title(TITLES[reward], fontsize=10)
            axes.set_xlabel("iterations")
        panels[0].set_ylabel("gain of the held-out reward, sd")
        _legend(figure, panels[0], [said for said, _ in FAMILIES.values()], columns=2)
        write(figure, path)


def recipes(read: Read, path: Path) -> None:
    """Mean held-out gains of the confirmed recipes over GPU hours of FLUX.1 with intervals, a panel for each world."""
    rows = [row for row in read("fast")["rows"] if row["stage"] == "confirm"]
    worlds = list(dict.fromkeys(row["world"] for row in rows))
    of_stage = of_recipes(rows)
    with style.figure(WIDTH, 540) as figure:
        panels = figure.subplots(2, 2, sharex=True)
        for world, axes in zip(worlds, panels.flat, strict=True):
            fallen = []
            for arm, (said, colour) in RECIPES.items():
                curves = [gains(row) for row in rows if (row["world"], row["arm"]) == (world, arm)]
                if not curves:
                    continue
                of_iteration = next(row["seconds"]["flux"] for row in rows if row["arm"] == arm) / 3600
                hours = [of_iteration * version for version, _ in curves[0]][1:]
                means = [over_seeds(np.array([curve[i][1] for curve in curves])) for i in range(1, len(curves[0]))]
                limits = [mean.low for mean in means], [mean.high for mean in means]
                _curve(axes, hours, [mean.mean for mean in means], limits, colour)
                fallen += [said.partition(",")[0]] if means[-1].mean < 0 else []
            if fallen:
                axes.text(0.03, 0.02, f"{' and '.join(fallen)}\nend below 0", transform=axes.transAxes, fontsize=9)
            best = np.mean([height(row) for row in rows if (row["world"], row["arm"]) == (world, BASELINE)])
            axes.axhline(0.9 * best, color="C7", linestyle="--", linewidth=1)
            if axes is panels[1, 1]:
                axes.annotate("90 % of\n24-in-24's best", (0.04, 0.92 * best), va="bottom", fontsize=9)
            title = f"{titled(world)}\nfast: {times(of_stage[world][FAST]['time']['flux']['90%'])}"
            axes.set_title(title, fontsize=10)
            axes.set(xscale="log", ylim=(0, None))
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.set_xticks([0.1, 0.3, 1, 3, 10])
            axes.minorticks_off()
        for axes in panels[1]:
            axes.set_xlabel("GPU hours of FLUX.1,\ncomputed, log scale")
        figure.supylabel("gain of the held-out reward, sd", fontsize=10)
        _legend(figure, panels[1, 1], [said for said, _ in RECIPES.values()], columns=2)
        write(figure, path)


def plans(read: Read, path: Path) -> None:
    """Ranks that cheaper plans lose against six steps in FP8, with intervals over prompts, a dot for each miniature."""
    rows = [row for row in read("refitted/plan_fidelity")["rows"] if row["decoded"] == "whole"]
    minis = list(dict.fromkeys(row["model"] for row in rows))
    with style.figure(WIDTH, 320) as figure:
        axes = figure.subplots()
        names = []
        for at, (name, plan) in enumerate(PLANS.items()):
            found = [row for row in rows if (row["steps"], row["after"], row["keep"]) == plan]
            names.append(name.replace(", ", "\n") + f"\n{100 * found[0]['cost']:.0f} % of the steps")
            for shift, mini in enumerate(minis):
                worse = [max(row["worse"].values()) for row in found if row["model"] == mini]
                mean, low, high = max(worse)
                place, colour = at + 0.2 * (shift - 1), f"C{shift}"
                axes.plot([low, high], [place, place], color=colour)
                axes.plot(mean, place, "o", color=colour, label=None if at else mini)
        axes.axvline(0, color="C7", linestyle="--", linewidth=1)
        axes.set_xlabel("mean ranks lost against six steps; 0 is as good")
        axes.set_yticks(range(len(names)), names)
        axes.grid(axis="y", visible=False)
        axes.invert_yaxis()
        figure.legend(loc="outside lower center", ncols=len(minis))
        write(figure, path)


def _curve(axes: Any, at: Sequence[float], means: Sequence[float], limits: Sequence[Any], colour: str) -> None:
    """A mean curve with its interval, and a dot at its highest point."""
    axes.plot(at, means, color=colour)
    axes.fill_between(at, *limits, color=colour, alpha=0.15, linewidth=0)
    best = int(np.argmax(means))
    axes.plot(at[best], means[best], "o", color=colour, markersize=7)


def _legend(figure: Any, axes: Any, names: Iterable[str], columns: int) -> None:
    """Names below the panels for the curves of one of them, which has all, and for the dot."""
    lines = [line for line in axes.get_lines() if line.get_marker() == "None" and line.get_linestyle() == "-"]
    (dot,) = axes.plot([], [], "o", color="C7", markersize=7)
    handles = [*lines, dot]
    figure.legend(handles, [*names, "best checkpoint"], loc="outside lower center", ncols=columns)


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
