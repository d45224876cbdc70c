"""Labels in plots: they cover neither each other nor the points."""

import random
from itertools import combinations
from typing import Any

import matplotlib.pyplot as plt
import pytest
from solrl_trainer.report.frontier import Point, write_frontier
from solrl_trainer.report.labels import Label, place_labels


def overlap(one: Any, other: Any) -> bool:
    return bool(one.x0 < other.x1 and other.x0 < one.x1 and one.y0 < other.y1 and other.y0 < one.y1)


@pytest.mark.parametrize("seed", range(5))
def test_labels_of_crowded_points_stay_apart(seed: int) -> None:
    chance = random.Random(seed)
    # Three clumps of six points, each point within a label's width of the others.
    points = [(clump + chance.gauss(0, 0.02), chance.gauss(0, 0.5)) for clump in range(3) for _ in range(6)]
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    axes.plot([x for x, _ in points], [y for _, y in points], "o", markersize=4)
    notes = place_labels(axes, [Label(x, y, f"label {i}", {"fontsize": 8}) for i, (x, y) in enumerate(points)])
    figure.canvas.draw()
    extents = [note.get_window_extent() for note in notes]
    plt.close(figure)
    assert [note.get_text() for note in notes] == [f"label {i}" for i in range(18)]
    assert not [pair for pair in combinations(range(18), 2) if overlap(*(extents[i] for i in pair))]
    for extent in extents:
        assert not any(extent.contains(*axes.transData.transform(point)) for point in points)
        assert axes.get_window_extent().contains(*extent.min)
        assert axes.get_window_extent().contains(*extent.max)


def test_a_lone_label_is_beside_its_point() -> None:
    figure, axes = plt.subplots()
    axes.plot([0, 1, 2], [0, 1, 0], "o")
    (note,) = place_labels(axes, [Label(1, 1, "here", {})])
    figure.canvas.draw()
    extent, (x, y) = note.get_window_extent(), axes.transData.transform((1, 1))
    plt.close(figure)
    assert max(extent.x0 - x, x - extent.x1, extent.y0 - y, y - extent.y1) < 15


def test_the_frontier_names_its_plans_and_nothing_is_covered(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(plt, "close", figures.append)
    # Plans that differ in the third digit, with the longest names there are; the chosen one is not on the frontier.
    long = "4 fitted steps (1, 0.875, 0.625, 0.375), pruned to 48 after 3"
    plans = [(f"nvfp4 {i} {long}", 0.8 + 0.002 * i, 0.85 + 0.001 * i) for i in range(6)]
    plans += [("bf16 2 steps", 0.4, 0.5), ("bf16 8 steps", 2.0, 0.9), ("bf16 6 steps", 1.5, 0.82)]
    points = [Point(name, s, q, q - 0.02, q + 0.02) for name, s, q in plans]
    path = write_frontier(points, 0.8, "bf16 6 steps", "mini-sana, clipscore + 0.2 × hpsv2, 16 prompts", tmp_path)
    assert path == tmp_path / "frontier.png"
    (figure,) = figures
    monkeypatch.undo()
    figure.canvas.draw()
    plot, key = figure.axes
    texts = [text for axes in (plot, key) for text in axes.texts if text.get_text()]
    extents = [text.get_window_extent() for text in texts]
    said = [text.get_text() for text in texts]
    plt.close(figure)
    assert plot.get_title(loc="left") == "mini-sana, clipscore + 0.2 × hpsv2, 16 prompts"
    assert said.count("9") == 2
    assert f"nvfp4 3 {long}: 0.81 s, separation 0.853" in said
    assert "bf16 6 steps: 1.50 s, separation 0.820; chosen" in said
    assert not [pair for pair in combinations(range(len(said)), 2) if overlap(*(extents[i] for i in pair))]
    for extent in extents:
        assert figure.bbox.contains(*extent.min), "a text is cut"
        assert figure.bbox.contains(*extent.max), "a text is cut"
