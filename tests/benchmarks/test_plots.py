"""Plots of the stored results."""

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def test_the_required_time_crosses_no_label(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import matplotlib.pyplot as plt
    from step_time import plot_steps

    figures: list[Any] = []
    monkeypatch.setattr(plt, "close", figures.append)
    plot_steps(json.loads((ROOT / "docs/results/step_time.json").read_text()), tmp_path / "plot.png")
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
