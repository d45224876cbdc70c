"""Plot of `plan_fidelity.py`; by itself, `python benchmarks/plan_fidelity_plot.py` draws it again from the JSON."""

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from plan_fidelity_table import ALLOWED, EARLY, SMALLER, WHOLE, decoded, is_reference
from solrl_trainer.report.labels import Label, place_labels

RESULTS = Path("docs/results")

STYLES: dict[str, dict[str, Any]] = {
    WHOLE: {"marker": "o", "markersize": 4, "linestyle": "-"},
    EARLY: {"marker": "o", "markersize": 5, "linestyle": "--", "markerfacecolor": "white"},
}
"""By how images are decoded."""

Row = dict[str, Any]
Plan = tuple[float, int]
"""(share of the steps spent, candidates kept)."""


def write_plot(rows: Sequence[Row], path: Path) -> None:
    """Plot the loss of selection quality over the steps spent, one panel per precision and model.

    Pale dots are single rewards; lines are their means, labelled with the candidates kept. Plans decoded early have
    dashed lines and open dots; they spend the steps of the same plans decoded whole, so these have the labels.
    """
    most = max(row["steps"] for row in rows)
    plans = [row for row in rows if not is_reference(row) and decoded(row) != SMALLER]
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
        own = [row for row in plans if (row["precision"], row["model"]) == (precision, model)]
        labels.append(_draw(axes, own, most))
        axes.axhline(ALLOWED, color="0.6", linestyle="--", zorder=0, label="allowed")
        axes.axhline(0, color="0.85", zorder=0)
        if any(decoded(row) == EARLY for row in own):
            axes.plot([], [], color="0.3", label="decoded early", **STYLES[EARLY])
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
    """Draw the plans of one model, a line for each way to prune and decoder; returns the labels of their means."""
    labels: dict[tuple[str, Plan], Label] = {}
    kinds = dict.fromkeys((row["steps"], row["after"]) for row in rows)
    for (at, (steps, after)), how in product(enumerate(kinds), STYLES):
        colour = f"C{at}"
        plans: dict[Plan, list[float]] = {}
        for row in rows:
            if (row["steps"], row["after"], decoded(row)) == (steps, after, how):
                worse = max(mean for mean, _, _ in row["worse"].values())
                plans.setdefault((row["cost"], row["keep"]), []).append(worse)
        if not plans:
            continue
        means = {plan: sum(each) / len(each) for plan, each in plans.items()}
        for (cost, _), each in plans.items():
            fill = {"markerfacecolor": "none"} if how == EARLY else {}
            axes.plot([cost] * len(each), each, ".", color=colour, alpha=0.4, **fill)
        kind = f"{steps} steps" if steps == most else f"{steps} fitted steps"
        name = f"{kind}, after {after} keep …" if after < steps else f"{kind}, all kept"
        new = not any(known == name for known, _ in labels)
        axes.plot(
            [cost for cost, _ in means], list(means.values()), color=colour, label=name if new else None, **STYLES[how]
        )
        for (cost, keep), mean in means.items():
            text = Label(cost, mean, str(keep), {"fontsize": 8, "color": colour})
            labels.setdefault((name, (cost, keep)), text)
    return list(labels.values())


if __name__ == "__main__":
    write_plot(json.loads((RESULTS / "plan_fidelity.json").read_text())["rows"], RESULTS / "plan_fidelity.png")
