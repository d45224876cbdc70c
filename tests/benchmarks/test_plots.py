"""Plots of the stored results."""

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("folder", ["", "refitted"])  # three models, and one
def test_the_labels_of_plan_fidelity_stay_apart(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib.pyplot as plt
    from plan_fidelity_plot import write_plot

    figures: list[Any] = []
    monkeypatch.setattr(plt, "close", figures.append)
    stored = ROOT / "docs/results" / folder / "plan_fidelity.json"
    write_plot(json.loads(stored.read_text())["rows"], tmp_path / "plot.png")
    (figure,) = figures
    monkeypatch.undo()
    figure.canvas.draw()
    (legend,) = figure.legends
    whole, own = figure.bbox, legend.get_window_extent()
    assert whole.x0 <= own.x0 < own.x1 <= whole.x1
    for axes in figure.axes:
        boxes = [text.get_window_extent() for text in axes.texts if text.get_text()]
        assert len(boxes) == 21
        for one, other in combinations(boxes, 2):
            assert not (one.x0 < other.x1 and other.x0 < one.x1 and one.y0 < other.y1 and other.y0 < one.y1)
    plt.close(figure)


def test_the_required_time_crosses_no_label(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib.pyplot as plt
    from step_time_report import plot_steps

    figures: list[Any] = []
    monkeypatch.setattr(plt, "close", figures.append)
    rows = json.loads((ROOT / "docs/results/step_time.json").read_text())["rows"]
    plot_steps([row for row in rows if "ms" in row], tmp_path / "plot.png")
    (figure,) = figures
    monkeypatch.undo()
    figure.canvas.draw()
    for axes in figure.axes:
        (line,) = axes.get_lines()
        x, _ = axes.transData.transform((line.get_xdata()[0], 0))
        boxes = [text.get_window_extent() for text in axes.texts]
        assert len(boxes) == 3
        assert not [box for box in boxes if box.x0 < x < box.x1]
    plt.close(figure)
