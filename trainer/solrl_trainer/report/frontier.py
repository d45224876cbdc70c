"""frontier.png: selection quality of exploration plans over their cost."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from solrl_trainer.output_files import writing
from solrl_trainer.report.labels import Label, place_labels

WIDTH = 9.0
"""In inches."""
_ROW = 0.19
"""Height in inches of a line of the key."""


class Point(NamedTuple):
    """A plan: its name, seconds per group, and separation with its interval."""

    name: str
    seconds: float
    separation: float
    low: float
    high: float


def write_frontier(points: Sequence[Point], wanted: float, chosen: str | None, about: str, folder: Path) -> Path:
    """Plot the plans, with a line through the Pareto-optimal ones; a numbered key names these and the chosen plan.

    Pale lines are the intervals of the separation.

    Args:
        points: the plans.
        wanted: required separation.
        chosen: name of the chosen plan, if there is one.
        about: description of the measurement, the second line of the title.
        folder: folder of frontier.png.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    best = frontier(points)
    named = sorted({*best, *(point for point in points if point.name == chosen)}, key=lambda point: point.seconds)
    figure, (axes, key) = plt.subplots(
        2,
        figsize=(WIDTH, 5 + _ROW * (len(named) + 2)),
        height_ratios=(5, _ROW * (len(named) + 2)),
        layout="constrained",
    )
    _draw_key(key, named, chosen)
    _draw_plans(axes, points, best, wanted)
    axes.set_title(about, fontsize=9, color="0.35", loc="left")
    figure.suptitle("Exploration plans: cost and fidelity", x=0.01, ha="left")
    labels = [Label(p.seconds, p.separation, str(n), _style(p.name == chosen)) for n, p in enumerate(named, 1)]
    place_labels(axes, labels)
    path = folder / "frontier.png"
    with writing(path):
        figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def frontier(points: Sequence[Point]) -> list[Point]:
    """Pareto-optimal plans, from the cheapest to the most expensive."""
    found: list[Point] = []
    for point in sorted(points, key=lambda p: (p.seconds, -p.separation)):
        if not found or point.separation > found[-1].separation:
            found.append(point)
    return found


def _draw_plans(axes: Any, points: Sequence[Point], best: Sequence[Point], wanted: float) -> None:
    colours = {tier: f"C{i}" for i, tier in enumerate(dict.fromkeys(point.name.split()[0] for point in points))}
    axes.plot([one.seconds for one in best], [one.separation for one in best], "-", color="0.6", zorder=0)
    for name, seconds, separation, low, high in points:
        marker = "v" if "pruned" in name else "o"
        axes.plot([seconds, seconds], [low, high], "-", color="0.85", linewidth=1, zorder=0)
        axes.plot(seconds, separation, marker, color=colours[name.split()[0]], alpha=0.8)
    axes.axhline(wanted, color="0.7", linestyle="--", zorder=0, label=f"wanted: {wanted:g}")
    for tier, colour in colours.items():
        axes.plot([], [], "o", color=colour, label=tier)
    axes.plot([], [], "v", color="0.4", label="pruned")
    axes.set(xlabel="seconds per group, rewards included", ylabel="separation of best and worst\n1 perfect, 0 chance")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.08, y=0.1)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))


def _draw_key(axes: Any, named: Sequence[Point], chosen: str | None) -> None:
    axes.set_axis_off()
    axes.set(xlim=(0, 1), ylim=(len(named) + 0.5, -1))
    axes.text(0, -0.2, "plans on the line; no other plan is both cheaper and better:", color="0.35", fontsize=8)
    for number, (name, seconds, separation, _, _) in enumerate(named, 1):
        style, mark = _style(name == chosen), "; chosen" if name == chosen else ""
        axes.text(0.02, number, str(number), va="center", ha="right", **style)
        text = f"{name}: {seconds:.2f} s, separation {separation:.3f}{mark}"
        axes.text(0.035, number, text, va="center", **style)


def _style(chosen: bool) -> dict[str, Any]:
    return {"fontsize": 8, "fontweight": "bold" if chosen else "normal"}
