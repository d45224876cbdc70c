"""Plot of `plan_fidelity.py`; by itself, `python benchmarks/plan_fidelity_plot.py` draws it again from the JSON."""

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from plan_fidelity_table import ALLOWED, WHOLE, decoded
from solrl_trainer.report.labels import Label, place_labels

RESULTS = Path("docs/results")

Row = dict[str, Any]
Plan = tuple[float, int]
"""(share of the steps spent, candidates kept)."""


def write_plot(rows: Sequence[Row], path: Path) -> None:
    """Plot the loss of selection quality over the steps spent, one panel per precision and model.

    Pale dots are single rewards; lines are their means, labelled with the candidates kept. Only plans decoded whole.
    """
    rows = [row for row in rows if decoded(row) == WHOLE]
    most = max(row["steps"] for row in rows)
    precisions = list(dict.fromkeys(row["precision"] for row in rows))
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, panels = plt.subplots(
        len(precisions),
        len(models),
        figsize=(5.2 * len(models), 0.4 + 5 * len(precisions)),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    labels = []
    for (precision, model), axes in zip(product(precisions, models), panels.flat, strict=True):
        own = [row for row in rows if (row["precision"], row["model"]) == (precision, model) and row["cost"] < 1]
        labels.append(_draw(axes, own, most))
        axes.axhline(ALLOWED, color="0.6", linestyle="--", zorder=0, label="allowed")
        axes.axhline(0, color="0.85", zorder=0)
        axes.set(title=f"{model}, {precision.upper()}", xlabel=f"candidate steps spent, of {most} steps unpruned")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(y=0.06)
    for axes in panels[:, 0]:
        axes.set_ylabel("increase in mean true rank of the best or worst 12")
    handles, names = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, names, frameon=False, loc="outside lower center", ncols=min(len(names), 2 * len(models)))
    for axes, its_labels in zip(panels.flat, labels, strict=True):
        place_labels(axes, its_labels)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw(axes: Any, rows: Sequence[Row], most: int) -> list[Label]:
    """Draw the plans of one model, a line for each way to prune; returns the labels of their means."""
    labels = []
    for at, (steps, after) in enumerate(dict.fromkeys((row["steps"], row["after"]) for row in rows)):
        colour = f"C{at}"
        plans: dict[Plan, list[float]] = {}
        for row in rows:
            if (row["steps"], row["after"]) == (steps, after):
                worse = max(mean for mean, _, _ in row["worse"].values())
                plans.setdefault((row["cost"], row["keep"]), []).append(worse)
        means = {plan: sum(each) / len(each) for plan, each in plans.items()}
        for (cost, _), each in plans.items():
            axes.plot([cost] * len(each), each, ".", color=colour, alpha=0.4)
        kind = f"{steps} steps" if steps == most else f"{steps} fitted steps"
        name = f"{kind}, after {after} keep …" if after < steps else f"{kind}, all kept"
        axes.plot([cost for cost, _ in means], list(means.values()), "o-", color=colour, label=name, markersize=4)
        style = {"fontsize": 8, "color": colour}
        labels += [Label(cost, mean, str(keep), style) for (cost, keep), mean in means.items()]
    return labels


if __name__ == "__main__":
    write_plot(json.loads((RESULTS / "plan_fidelity.json").read_text())["rows"], RESULTS / "plan_fidelity.png")
