"""The plot of exploration plans: each is named, and no text covers another."""

from itertools import combinations
from pathlib import Path
from typing import Any

from matplotlib.text import Text
from PIL import Image
from solrl_trainer.report import style
from solrl_trainer.report.frontier import PlanPoint, draw_frontier, write_frontier


def overlap(one: Any, other: Any) -> bool:
    return bool(one.x0 < other.x1 and other.x0 < one.x1 and one.y0 < other.y1 and other.y0 < one.y1)


def test_the_frontier_names_its_plans_and_nothing_is_covered(tmp_path: Path) -> None:
    # Plans that differ in the third digit, with the longest names there are; the chosen one is not on the frontier.
    long = "4 fitted steps (1, 0.875, 0.625, 0.375), pruned to 48 after 3"
    plans = [(f"nvfp4 {i} {long}", 0.8 + 0.002 * i, 0.85 + 0.001 * i) for i in range(6)]
    plans += [("bf16 2 steps", 0.4, 0.5), ("bf16 8 steps", 2.0, 0.9), ("bf16 6 steps", 1.5, 0.82)]
    points = [PlanPoint(name, s, q, q - 0.02, q + 0.02) for name, s, q in plans]
    about = (0.8, "bf16 6 steps", "mini-sana, clipscore + 0.2 × hpsv2, 16 prompts")
    path = write_frontier(points, *about, tmp_path)
    assert path == tmp_path / "frontier.png"
    assert Image.open(path).width == 1080
    with style.figure(648, 514) as figure:
        panels = figure.subplots(2, height_ratios=(360, 154))
        draw_frontier(panels, points, *about)
        figure.draw_without_rendering()
    texts = [text for axes in panels for text in axes.texts]
    extents = [Text.get_window_extent(text) for text in texts]  # without their lines
    said = [text.get_text() for text in texts]
    assert panels[0].get_title(loc="left") == "mini-sana, clipscore + 0.2 × hpsv2, 16 prompts"
    assert said.count("9") == 2
    assert f"nvfp4 3 {long}: 0.81 s, separation 0.853" in said
    assert "bf16 6 steps: 1.50 s, separation 0.820; chosen" in said
    assert not [pair for pair in combinations(range(len(said)), 2) if overlap(*(extents[i] for i in pair))]
    for extent in extents:
        assert figure.bbox.contains(*extent.min), "a text is cut"
        assert figure.bbox.contains(*extent.max), "a text is cut"
