"""Plot of `plan_fidelity.py`; by itself, `python benchmarks/plan_fidelity_plot.py` draws it again from the JSON."""

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from plan_fidelity_table import ALLOWED, WHOLE, decoded
from solrl_trainer.report import style

RESULTS = Path("docs/results")

Row = dict[str, Any]
Plan = tuple[float, int]
"""(share of the steps spent, candidates kept)."""


def write_plot(rows: Sequence[Row], path: Path) -> None:
    """Plot the loss of selection quality over the steps spent, one panel per precision and model.

    Pale dots are single rewards; lines are their means, marked with the candidates kept. Only plans decoded whole.
    """
    rows = [row for row in rows if decoded(row) == WHOLE]
    most = max(row["steps"] for row in rows)
    precisions = list(dict.fromkeys(row["precision"] for row in rows))
    models = list(dict.fromkeys(row["model"] for row in rows))
    with style.figure(374 * len(models), 29 + 360 * len(precisions)) as figure:
        panels = figure.subplots(len(precisions), len(models), sharey=True, squeeze=False)
        for (precision, model), axes in zip(product(precisions, models), panels.flat, strict=True):
            own = [row for row in rows if (row["precision"], row["model"]) == (precision, model) and row["cost"] < 1]
            _draw(axes, own, most)
            axes.axhline(ALLOWED, color="0.6", linestyle="--", zorder=1, label="allowed")
            axes.set(title=f"{model}, {precision.upper()}", xlabel=f"candidate steps spent, of {most} steps unpruned")
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
            axes.margins(y=0.06)
        for axes in panels[:, 0]:
            axes.set_ylabel("increase in mean true rank of the best or worst 12")
        handles, names = panels[0][0].get_legend_handles_labels()
        figure.legend(handles, names, loc="outside lower center", ncols=min(len(names), 2 * len(models)))
        figure.savefig(path, dpi=120)


def _draw(axes: Any, rows: Sequence[Row], most: int) -> None:
    """Draw the plans of one model, a line for each way to prune."""
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
        axes.plot([cost for cost, _ in means], list(means.values()), "-", color=colour, label=name, linewidth=1)
        for (cost, keep), mean in means.items():
            around = {"boxstyle": "circle,pad=0.12", "facecolor": "white", "edgecolor": colour, "linewidth": 0.8}
            axes.text(cost, mean, str(keep), fontsize=7, color=colour, ha="center", va="center", bbox=around)


if __name__ == "__main__":
    write_plot(json.loads((RESULTS / "plan_fidelity.json").read_text())["rows"], RESULTS / "plan_fidelity.png")
