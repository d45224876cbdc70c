"""Plot of `plan_fidelity.py`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def write_plot(rows: Sequence[dict[str, Any]], allowed: float, path: Path) -> None:
    """Plot the loss of selection quality over the steps spent, one panel per model.

    Dots are single rewards; lines are their means.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    most = max(row["steps"] for row in rows)
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, panels = plt.subplots(
        1, len(models), figsize=(4.4 * len(models), 4.2), sharey=True, squeeze=False, layout="constrained"
    )
    for model, axes in zip(models, panels[0], strict=True):
        pruning = [row for row in rows if row["model"] == model and row["cost"] < 1]
        for at, (steps, after) in enumerate(dict.fromkeys((row["steps"], row["after"]) for row in pruning)):
            plans: dict[tuple[float, int], list[float]] = {}
            for row in pruning:
                if (row["steps"], row["after"]) == (steps, after):
                    worse = max(mean for mean, _, _ in row["worse"].values())
                    plans.setdefault((row["cost"], row["keep"]), []).append(worse)
            for (cost, keep), each in plans.items():
                mean = sum(each) / len(each)
                axes.plot([cost] * len(each), each, ".", color=f"C{at}", alpha=0.4)
                axes.annotate(str(keep), (cost, mean), xytext=(4, 4), textcoords="offset points", fontsize=8)
            means = [sum(each) / len(each) for each in plans.values()]
            kind = f"{steps} steps" if steps == most else f"{steps} fitted steps"
            label = f"{kind}, after {after} keep …" if after < steps else f"{kind}, all kept"
            axes.plot([cost for cost, _ in plans], means, "o-", color=f"C{at}", label=label)
        axes.axhline(allowed, color="0.6", linestyle="--", zorder=0)
        axes.axhline(0, color="0.85", zorder=0)
        axes.set(title=model, xlabel=f"steps spent, of {most} unpruned")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("increase in true rank of the best or worst 12")
    panels[0][-1].legend(frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)
