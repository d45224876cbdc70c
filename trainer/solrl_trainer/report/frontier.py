"""frontier.png: selection quality of exploration plans over their cost."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from solrl_trainer.report import style
from solrl_trainer.run_folder.output_files import writing

_WIDTH, _HEIGHT, _ROW = 648, 360, 14
"""In points: width, height of the plot, and of a line of the key."""
_APART = 0.025
"""Least distance of numbers, as a share of the plot's width."""


class PlanPoint(NamedTuple):
    """A plan: its name, seconds per group, and separation with its interval."""

    name: str
    seconds: float
    separation: float
    low: float
    high: float


def write_frontier(points: Sequence[PlanPoint], required: float, chosen: str | None, about: str, folder: Path) -> Path:
    """Plot the plans, with a line through the Pareto-optimal ones; a numbered key names these and the chosen plan.

    Pale lines are the intervals of the separation.

    Args:
        chosen: name of the chosen plan, if there is one.
        about: description of the measurement, the second line of the title.
    """
    path, key = folder / "frontier.png", _ROW * (len(_named(points, chosen)) + 2)
    with style.figure(_WIDTH, _HEIGHT + key) as figure:
        draw_frontier(figure.subplots(2, height_ratios=(_HEIGHT, key)), points, required, chosen, about)
        figure.suptitle("Exploration plans: cost and fidelity", x=0.01, ha="left")
        with writing(path):
            figure.savefig(path, dpi=120)
    return path


def draw_frontier(
    panels: Sequence[Any], points: Sequence[PlanPoint], required: float, chosen: str | None, about: str
) -> None:
    """Draw the plot and its key into two axes of matplotlib."""
    axes, key = panels
    named = _named(points, chosen)
    _draw_plans(axes, points, frontier(points), required)
    _draw_numbers(axes, named, chosen)
    _draw_key(key, named, chosen)
    axes.set_title(about, fontsize=9, loc="left", pad=24)


def frontier(points: Sequence[PlanPoint]) -> list[PlanPoint]:
    """Pareto-optimal plans, from the cheapest to the most expensive."""
    optimal: list[PlanPoint] = []
    for point in sorted(points, key=lambda p: (p.seconds, -p.separation)):
        if not optimal or point.separation > optimal[-1].separation:
            optimal.append(point)
    return optimal


def _draw_plans(axes: Any, points: Sequence[PlanPoint], best: Sequence[PlanPoint], required: float) -> None:
    colours = {tier: f"C{i}" for i, tier in enumerate(dict.fromkeys(point.name.split()[0] for point in points))}
    axes.plot([one.seconds for one in best], [one.separation for one in best], "-", color="0.6", zorder=1)
    for name, seconds, separation, low, high in points:
        marker = "v" if "pruned" in name else "o"
        axes.plot([seconds, seconds], [low, high], "-", color="0.85", linewidth=1, zorder=1)
        axes.plot(seconds, separation, marker, color=colours[name.split()[0]], alpha=0.8)
    axes.axhline(required, color="0.7", linestyle="--", zorder=1, label=f"wanted: {required:g}")
    for tier, colour in colours.items():
        axes.plot([], [], "o", color=colour, label=tier)
    axes.plot([], [], "v", color="0.4", label="pruned")
    axes.set(xlabel="seconds per group, rewards included", ylabel="separation of best and worst\n1 perfect, 0 chance")
    axes.margins(x=0.08, y=0.1)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))


def _named(points: Sequence[PlanPoint], chosen: str | None) -> list[PlanPoint]:
    return sorted({*frontier(points), *(point for point in points if point.name == chosen)}, key=lambda p: p.seconds)


def _draw_numbers(axes: Any, named: Sequence[PlanPoint], chosen: str | None) -> None:
    """Draw the numbers of plans side by side above the plot, each with a line to its plan."""
    low, high = axes.get_xlim()
    places: list[float] = []
    for point in named:
        places.append(max((point.seconds - low) / (high - low), places[-1] + _APART if places else 0))
    for number, (point, x) in enumerate(zip(named, places, strict=True), 1):
        x = min(x, 1 - _APART * (len(named) - number))
        line = {"arrowstyle": "-", "color": "0.8", "linewidth": 0.6, "shrinkB": 4}
        look = {"ha": "center", "va": "bottom", "arrowprops": line, **_style(point.name == chosen)}
        axes.annotate(str(number), (point.seconds, point.separation), (x, 1.02), textcoords="axes fraction", **look)


def _draw_key(axes: Any, named: Sequence[PlanPoint], chosen: str | None) -> None:
    axes.set_axis_off()
    axes.set(xlim=(0, 1), ylim=(len(named) + 0.5, -1))
    axes.text(0, -0.2, "plans on the line; no other plan is both cheaper and better:", fontsize=8)
    for number, (name, seconds, separation, _, _) in enumerate(named, 1):
        style, mark = _style(name == chosen), "; chosen" if name == chosen else ""
        axes.text(0.02, number, str(number), va="center", ha="right", **style)
        text = f"{name}: {seconds:.2f} s, separation {separation:.3f}{mark}"
        axes.text(0.035, number, text, va="center", **style)


def _style(chosen: bool) -> dict[str, Any]:
    return {"fontsize": 8, "fontweight": "bold" if chosen else "normal"}
