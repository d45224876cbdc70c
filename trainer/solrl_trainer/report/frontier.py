"""frontier.png: selection quality of exploration plans over their cost."""

from collections.abc import Sequence
from pathlib import Path


def write_frontier(points: Sequence[tuple[str, float, float]], wanted: float, chosen: str | None, folder: Path) -> Path:
    """Plot (name, seconds, separation) of each plan; the Pareto-optimal plans are labelled and joined by a line."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 5.5), layout="constrained")
    colours = {tier: f"C{i}" for i, tier in enumerate(dict.fromkeys(name.split()[0] for name, _, _ in points))}
    for name, seconds, separation in points:
        marker = "v" if "pruned" in name else "o"
        axes.plot(seconds, separation, marker, color=colours[name.split()[0]], alpha=0.8)
    best = frontier(points)
    axes.plot([s for _, s, _ in best], [q for _, _, q in best], "-", color="0.6", zorder=0)
    for name, seconds, separation in best:
        weight = "bold" if name == chosen else "normal"
        axes.annotate(
            name, (seconds, separation), xytext=(6, -10), textcoords="offset points", fontsize=8, fontweight=weight
        )
    axes.axhline(wanted, color="0.8", linestyle="--", zorder=0)
    for tier, colour in colours.items():
        axes.plot([], [], "o", color=colour, label=tier)
    axes.plot([], [], "v", color="0.4", label="pruned")
    axes.set(
        xlabel="seconds per group",
        ylabel="separation of best and worst (1 perfect, 0 chance)",
        title="Exploration plans: cost and fidelity",
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.15)
    axes.legend(frameon=False, loc="lower right")
    path = folder / "frontier.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def frontier(points: Sequence[tuple[str, float, float]]) -> list[tuple[str, float, float]]:
    """Pareto-optimal plans, from the cheapest to the most expensive."""
    found: list[tuple[str, float, float]] = []
    for point in sorted(points, key=lambda p: (p[1], -p[2])):
        if not found or point[2] > found[-1][2]:
            found.append(point)
    return found
