import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from solrl_trainer.report.axes import nice_ticks
from solrl_trainer.report.charts import Series, line_chart, running_mean, stacked_chart

VALUES = st.floats(-1e6, 1e6, allow_nan=False).map(lambda value: round(value, 6))


@given(VALUES, VALUES)
def test_ticks_span_the_values_in_even_steps(one, other):
    low, high = sorted((one, other))
    ticks = nice_ticks(low, high)
    step = ticks[1] - ticks[0]
    assert 2 <= len(ticks) <= 7
    assert ticks[0] <= low + step * 1e-6
    assert ticks[-1] >= high - step * 1e-6


@given(st.lists(VALUES, min_size=1, max_size=40))
def test_a_line_stays_within_its_plot(values):
    chart = line_chart("x", range(len(values)), [Series("a", "best", values)])
    points = re.findall(r"(-?[\d.]+) (-?[\d.]+)", chart.lines[0].path)
    assert len(points) == len(values)
    assert all(-0.1 <= float(x) <= 1000.1 and -0.1 <= float(y) <= 400.1 for x, y in points)
    assert len(chart.spots) == len(values)


def test_values_are_placed_by_their_size():
    chart = line_chart("x", [0, 10, 20], [Series("a", "best", [0.0, 5.0, 10.0])])
    assert chart.lines[0].path.replace("-0.0", "0.0") == "M0.0 400.0L500.0 200.0L1000.0 0.0"
    assert [(tick.at, tick.text) for tick in chart.x_ticks][-1] == (100.0, "20")


def test_a_running_mean_looks_back_only():
    assert running_mean([1, 2, 3, 4, 5, 6], window=3) == [1, 1.5, 2, 3, 4, 5]


def test_stacked_bars_add_up_and_bins_keep_the_mean():
    chart = stacked_chart("x", range(1, 241), {"explore": [2.0] * 240, "train": [3.0] * 240}, "s")
    assert len(chart.bars) == 2 * 120
    lower, upper = chart.bars[:2]
    assert upper.y + upper.height == pytest.approx(lower.y)
    assert lower.y + lower.height == pytest.approx(400)
    assert upper.height / lower.height == pytest.approx(1.5)
    assert chart.spots[0].text == "1–2, mean: explore 2.0 s, train 3.0 s"
