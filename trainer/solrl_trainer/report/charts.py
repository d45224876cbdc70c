"""Geometry of the report's charts: figures in, SVG path data and tick positions out.

Colours and HTML are left to the template. The plot is 1000 × 400 units, stretched to the page's width, so ticks and
labels are positioned outside it in per cent.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from solrl_trainer.report.axes import HEIGHT, WIDTH, Tick, nice_ticks, scale, x_ticks, y_ticks

MOST_BARS = 120
SMOOTHED_FROM = 12
"""Shorter series are drawn without a running mean."""
WINDOW = 5


@dataclass(frozen=True)
class Line:
    """A series as path data; `raw` is drawn faintly behind when `path` is a running mean."""

    name: str
    style: str
    path: str
    raw: str = ""
    dots: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Bar:
    """A segment of a stacked bar."""

    style: str
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class Spot:
    """A column of the plot with a tooltip."""

    x: float
    width: float
    text: str


@dataclass(frozen=True)
class Chart:
    """Geometry and texts of one chart, for the template."""

    label: str
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    legend: list[tuple[str, str]]
    lines: list[Line] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    spots: list[Spot] = field(default_factory=list)
    band: str = ""


@dataclass(frozen=True)
class Series:
    """A line: name in the legend, style, one value per x, and whether each value is marked by a dot."""

    name: str
    style: str
    values: Sequence[float]
    dots: bool = False


def line_chart(
    label: str,
    xs: Sequence[int],
    series: Sequence[Series],
    *,
    band: bool = False,
    interval: tuple[Sequence[float], Sequence[float]] | None = None,
    smooth: bool = True,
) -> Chart:
    """Line chart over `xs`; long series are drawn as a running mean, with the raw values faintly behind.

    Args:
        label: description of the chart, for screen readers.
        xs: increasing whole numbers.
        series: at least one.
        band: fill the area between the first two lines.
        interval: low and high values around the first line, whose area is filled instead.
        smooth: allow the running mean.
    """
    values = [value for one in series for value in one.values] + [value for end in interval or () for value in end]
    ticks = nice_ticks(min(values), max(values))
    low, high = min(ticks[0], *values), max(ticks[-1], *values)
    place_x, place_y = scale(xs[0], xs[-1], WIDTH), scale(high, low, HEIGHT)
    points = [place_x(x) for x in xs]
    smoothing = smooth and len(xs) >= SMOOTHED_FROM
    lines, means = [], []
    for one in series:
        mean = running_mean(one.values) if smoothing else list(one.values)
        means.append([place_y(value) for value in mean])
        raw = path_data(points, [place_y(value) for value in one.values]) if smoothing else ""
        marks = tuple(zip(points, means[-1], strict=True)) if one.dots or len(xs) == 1 else ()
        lines.append(Line(one.name, one.style, path_data(points, means[-1]), raw, marks))
    filled = ""
    edges = means[:2] if band else [[place_y(value) for value in end] for end in interval or ()]
    if edges and len(xs) > 1:
        filled = path_data(points, edges[0]) + path_data(points[::-1], edges[1][::-1]).replace("M", "L", 1) + "Z"
    texts = [f"{x}: " + ", ".join(f"{one.name} {one.values[i]:.4g}" for one in series) for i, x in enumerate(xs)]
    if interval is not None:
        texts = [f"{text} [{low:.4g}, {high:.4g}]" for text, low, high in zip(texts, *interval, strict=True)]
    return Chart(
        label=label,
        x_ticks=x_ticks(xs, place_x),
        y_ticks=y_ticks(ticks, place_y),
        legend=[(one.name, one.style) for one in series],
        lines=lines,
        spots=_spots(points, texts),
        band=filled,
    )


def stacked_chart(label: str, xs: Sequence[int], layers: Mapping[str, Sequence[float]], unit: str) -> Chart:
    """Stacked bar chart of `layers` (name and style → one value per x); if there are many, neighbours share a bar."""
    group = math.ceil(len(xs) / MOST_BARS)
    starts = range(0, len(xs), group)
    means = {
        name: [sum(part) / len(part) for part in (values[i : i + group] for i in starts)]
        for name, values in layers.items()
    }
    top = max(sum(values) for values in zip(*means.values(), strict=True)) or 1.0
    ticks = nice_ticks(0.0, top)
    high = max(ticks[-1], top)
    place_y = scale(high, 0.0, HEIGHT)
    slot = WIDTH / len(starts)
    bars, texts = [], []
    for index, start in enumerate(starts):
        under = 0.0
        for name, values in means.items():
            over = under + values[index]
            bars.append(Bar(name, index * slot + 0.1 * slot, place_y(over), 0.8 * slot, place_y(under) - place_y(over)))
            under = over
        last = xs[min(start + group, len(xs)) - 1]
        span = f"{xs[start]}" if group == 1 else f"{xs[start]}–{last}, mean"
        texts.append(f"{span}: " + ", ".join(f"{n} {v[index]:.1f} {unit}" for n, v in means.items()))
    centres = [(index + 0.5) * slot for index in range(len(starts))]
    return Chart(
        label=label,
        x_ticks=x_ticks(xs, scale(xs[0] - 0.5, xs[-1] + 0.5, WIDTH)),
        y_ticks=y_ticks(ticks, place_y),
        legend=[(name, name) for name in layers],
        bars=bars,
        spots=[Spot(centre - slot / 2, slot, text) for centre, text in zip(centres, texts, strict=True)],
    )


def running_mean(values: Sequence[float], window: int = WINDOW) -> list[float]:
    """Mean of each value and the ones before it, at most `window` values."""
    return [sum(part) / len(part) for part in (values[max(0, i + 1 - window) : i + 1] for i in range(len(values)))]


def path_data(xs: Sequence[float], ys: Sequence[float]) -> str:
    """SVG path through points."""
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in zip(xs, ys, strict=True))


def _spots(points: Sequence[float], texts: Sequence[str]) -> list[Spot]:
    edges = [0.0, *((a + b) / 2 for a, b in pairwise(points)), WIDTH]
    return [Spot(a, b - a, text) for (a, b), text in zip(pairwise(edges), texts, strict=True)]
