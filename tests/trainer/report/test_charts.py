"""Charts as SVG: a tooltip per position, nothing outside the drawing, and the page's colours."""

import re
from xml.etree import ElementTree

from hypothesis import given, settings
from hypothesis import strategies as st
from solrl_trainer.report.charts import Chart, Series, line_chart, stacked_chart
from solrl_trainer.report.page import evaluation_charts
from solrl_trainer.run_folder.figures import READ_RIGHT

VALUES = st.floats(-1e6, 1e6, allow_nan=False).map(lambda value: round(value, 6))


def tips(chart: Chart) -> list[str]:
    return re.findall("<title>(.*?)</title>", chart.drawings["small"])


def labels(chart: Chart) -> list[str]:
    return re.findall(r"<text[^>]*>(.*?)</text>", chart.drawings["small"])


@settings(max_examples=20, deadline=None)
@given(st.lists(VALUES, min_size=1, max_size=40))
def test_a_line_stays_within_its_drawing(values: list[float]) -> None:
    chart = line_chart("x", [Series("a", 0, range(len(values)), values, dots=True)])
    (svg,) = chart.drawings.values()
    root = ElementTree.fromstring(svg.replace("<svg", '<svg xmlns:xlink="http://www.w3.org/1999/xlink"', 1))
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    marks = [(float(one.attrib["x"]), float(one.attrib["y"])) for one in root.iter("use")]
    assert len(marks) == len(values)
    assert all(0 <= x <= width and 0 <= y <= height for x, y in marks)
    assert len(tips(chart)) == len(values)


def test_drawings_are_equal_small_and_in_the_pages_colours() -> None:
    def draw() -> Chart:
        return line_chart("a & b", [Series("<a>", 0, [0, 10, 20], [0.0, 5.0, 10.0])], large=True)

    chart, drawings = draw(), draw().drawings
    assert chart.drawings == drawings
    assert set(drawings) == {"large", "small"}
    for svg in drawings.values():
        assert len(svg) < 6000
        assert svg.startswith('<svg role="img" aria-label="a &amp; b" viewBox="0 0 ')
        assert set(re.findall("var\\(--(.*?)\\)", svg)) == {"c0", "dim", "grid"}
        assert not re.search(r"#[0-9a-f]{6}|url\(|<style|<metadata| id=", svg)
    assert labels(chart) == ["0", "5", "10", "15", "20", *("0", "2", "4", "6", "8", "10")]
    assert tips(chart) == ["0: &lt;a&gt; 0", "10: &lt;a&gt; 5", "20: &lt;a&gt; 10"]


def test_one_value_is_a_dot_long_curves_are_smoothed_and_steps_stacked() -> None:
    chart = stacked_chart("x", range(1, 241), {"explore": (2, [2.0] * 240), "train": (4, [3.0] * 240)})
    assert len(tips(chart)) == 120
    assert tips(chart)[-1] == "240: explore 2.0 s, train 3.0 s"
    assert {"var(--c2)", "var(--c4)"} <= set(re.findall(r"fill: (var\(--c\d\))", chart.drawings["small"]))
    assert labels(chart)[-1] == "5"
    curves = [Series("a", 0, [3.0], [1.0]), Series("b", 1, list(range(1, 31)), [0.0, 1.0] * 15)]
    chart = line_chart("a chart", curves, smooth=True)
    svg = chart.drawings["small"]
    assert chart.smoothed
    assert not chart.banded
    assert svg.count("<use ") == 1
    assert len(re.findall("stroke: var\\(--c1\\)", svg)) == 2
    assert labels(chart)[:3] == ["10", "20", "30"]
    assert tips(chart)[2] == "3: a 1, b 0"
    assert not line_chart("a chart", curves).smoothed


def test_an_interval_ends_where_its_reward_does() -> None:
    rewards = ("ocr", READ_RIGHT, "clipscore")
    base = {"version": 0, "rewards": dict.fromkeys(rewards, 0.5)}
    ends = {"low": dict.fromkeys(rewards, 0.75), "high": dict.fromkeys(rewards, 1.25)}
    charts = evaluation_charts([base, {"version": 1, "rewards": dict.fromkeys(rewards, 1.0), **ends}], {"ocr": 1})
    assert [tips(chart)[1] for chart in charts] == [
        "1: ocr 1 [0.75, 1]",
        "1: read right (ocr), % 100 [75, 100]",
        "1: clipscore 1 [0.75, 1.25]",
    ]
