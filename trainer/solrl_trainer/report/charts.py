"""Charts of the report: figures in, SVG with a tooltip per position out."""

import html
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from solrl_trainer.report import style

SMOOTHED_FROM = 12
"""Shorter series are drawn without a running mean."""
WINDOW = 5
_SMALL, _LARGE = (330, 190), (860, 240)
"""Width and height in pixels: beside other charts or on a phone, and across the page."""
_MOST_TOOLTIPS = 120

Tooltip = tuple[float, float, str]
"""Left and right end of a column of the plot, and its text."""


@dataclass(frozen=True)
class Series:
    """Values over increasing positions.

    Attributes:
        name: in legend and tooltips.
        colour: number in the house style.
        interval: low and high values around the line.
    """

    name: str
    colour: int
    xs: Sequence[float]
    values: Sequence[float]
    dots: bool = False
    dashed: bool = False
    interval: tuple[Sequence[float], Sequence[float]] | None = None


@dataclass(frozen=True)
class Chart:
    """A drawn chart.

    Attributes:
        label: description, for screen readers.
        legend: names with their colours.
        drawings: class in the page → SVG.
        smoothed: whether lines are running means, with the values faintly behind.
    """

    label: str
    legend: list[tuple[str, int]]
    drawings: dict[str, str]
    smoothed: bool = False
    banded: bool = False


def line_chart(
    label: str,
    series: Sequence[Series],
    *,
    smooth: bool = False,
    band: bool = False,
    large: bool = False,
) -> Chart:
    """Chart of at least one line, none of them empty; `label` is its description, for screen readers.

    With `smooth`, long series are running means, with the values faintly behind; with `band`, the area between the
    first two lines is filled; with `large`, the chart is also drawn across the page.
    """
    places = sorted({x for line in series for x in line.xs})
    tooltips = _tooltips(places, lambda place: f"{place:g}: {_values_at(series, place)}")

    def draw(axes: Any) -> None:
        drawn = [_draw_line(axes, line, smooth) for line in series]
        if band:
            high, low = drawn[:2]
            axes.fill_between(
                series[0].xs, low, high, color=f"C{series[0].colour}", alpha=0.1, linewidth=0, clip_on=False
            )

    return Chart(
        label=label,
        legend=[(line.name, line.colour) for line in series],
        drawings=_drawings(label, draw, tooltips, large=large),
        smoothed=any(_smoothed(line, smooth) for line in series),
        banded=any(line.interval is not None for line in series),
    )


def stacked_chart(label: str, xs: Sequence[int], layers: Mapping[str, tuple[int, Sequence[float]]]) -> Chart:
    """Chart of stacked steps across the page: `layers` is name → colour and seconds of each x."""
    edges = [xs[0] - 0.5, *(x + 0.5 for x in xs)]
    steps = [[*values, values[-1]] for _, values in layers.values()]

    def draw(axes: Any) -> None:
        colours = [f"C{colour}" for colour, _ in layers.values()]
        axes.stackplot(edges, steps, step="post", colors=colours, linewidth=0, clip_on=False)

    def tooltip(x: float) -> str:
        values = {name: values[bisect_left(xs, x)] for name, (_, values) in layers.items()}
        return f"{x}: " + ", ".join(f"{name} {value:.1f} s" for name, value in values.items())

    return Chart(
        label=label,
        legend=[(name, colour) for name, (colour, _) in layers.items()],
        drawings=_drawings(label, draw, _tooltips(xs, tooltip), large=True),
    )


def running_mean(values: Sequence[float], window: int = WINDOW) -> list[float]:
    """Mean of each value and the ones before it, at most `window` values."""
    return [sum(part) / len(part) for part in (values[max(0, i + 1 - window) : i + 1] for i in range(len(values)))]


def _smoothed(series: Series, smooth: bool) -> bool:
    return smooth and len(series.xs) >= SMOOTHED_FROM


def _draw_line(axes: Any, series: Series, smooth: bool) -> Sequence[float]:
    """Draw a series; returns the values of its line."""
    # Not clipped: a clipping path would be lost with the drawing that defines it, if a page hides that one.
    look: dict[str, Any] = {"color": f"C{series.colour}", "clip_on": False}
    xs, ys = series.xs, series.values
    if _smoothed(series, smooth):
        axes.plot(xs, ys, linewidth=1, alpha=0.35, **look)
        ys = running_mean(ys)
    marker = "o" if series.dots or len(xs) == 1 else None
    axes.plot(xs, ys, "--" if series.dashed else "-", marker=marker, markersize=5, **look)
    if series.interval is not None:
        axes.fill_between(xs, *series.interval, alpha=0.1, linewidth=0, **look)
    return ys


def _values_at(series: Sequence[Series], place: float) -> str:
    passed = [(line, bisect_right(line.xs, place) - 1) for line in series]
    return ", ".join(f"{line.name} {line.values[i]:.4g}{_interval_text(line, i)}" for line, i in passed if i >= 0)


def _interval_text(series: Series, i: int) -> str:
    return "" if series.interval is None else f" [{series.interval[0][i]:.4g}, {series.interval[1][i]:.4g}]"


def _tooltips(places: Sequence[float], text_at: Callable[[float], str]) -> list[Tooltip]:
    """A column around each position, with its text; of many positions, some with the last."""
    every = math.ceil(len(places) / _MOST_TOOLTIPS)
    places = places[(len(places) - 1) % every :: every]
    edges = [places[0] - 0.5, *((a + b) / 2 for a, b in pairwise(places)), places[-1] + 0.5]
    return [(a, b, text_at(place)) for (a, b), place in zip(pairwise(edges), places, strict=True)]


def _drawings(label: str, draw: Callable[[Any], None], tooltips: Sequence[Tooltip], *, large: bool) -> dict[str, str]:
    sizes = {"large": _LARGE, "small": _SMALL} if large else {"small": _SMALL}
    return {name: _svg(label, size, draw, tooltips) for name, size in sizes.items()}


def _svg(label: str, size: tuple[int, int], draw: Callable[[Any], None], tooltips: Sequence[Tooltip]) -> str:
    from matplotlib.ticker import MaxNLocator

    width, height = size
    with style.figure(width, height) as figure:
        axes = figure.subplots()
        draw(axes)
        axes.margins(x=0)
        axes.grid(visible=False, axis="x")
        axes.grid(clip_on=False, axis="y")
        axes.spines[["left", "bottom"]].set_visible(False)
        axes.tick_params(length=0, pad=7, labelsize=12)
        axes.yaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
        axes.xaxis.set_major_locator(MaxNLocator(width // 60, steps=[1, 2, 5, 10], integer=True))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        text = style.svg(figure)
        box = axes.get_window_extent()
        pixels = [
            axes.transData.transform([(end, 0) for end in column])[:, 0].clip(box.x0, box.x1) for *column, _ in tooltips
        ]
    columns = "".join(
        f'<rect class="tip" x="{a:.1f}" y="{height - box.y1:.1f}" width="{b - a:.1f}" height="{box.height:.1f}">'
        f"<title>{html.escape(tip)}</title></rect>"
        for (a, b), (_, _, tip) in zip(pixels, tooltips, strict=True)
    )
    named = text.replace("<svg", f'<svg role="img" aria-label="{html.escape(label)}"', 1)
    return named.replace("</svg>", f"{columns}</svg>")
