"""Curves of several runs in one chart, each with x positions of its own."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from solrl_trainer.report.axes import HEIGHT, WIDTH, Tick, nice_ticks, scale, y_ticks
from solrl_trainer.report.charts import SMOOTHED_FROM, Chart, Line, Spot, path_data, running_mean

_COLUMNS = 48
"""Columns of the plot with a tooltip."""


@dataclass(frozen=True)
class Curve:
    """One run's values over increasing positions."""

    name: str
    style: str
    xs: Sequence[float]
    values: Sequence[float]


@dataclass(frozen=True)
class Unit:
    """A unit of the x axis: one of it is `size`, and `name` follows its numbers."""

    size: float
    name: str


_COUNTS = (Unit(1.0, ""), Unit(1e3, "k"), Unit(1e6, "M"))
_TIMES = (Unit(1.0, "s"), Unit(60.0, "min"), Unit(3600.0, "h"))


def count_unit(largest: float) -> Unit:
    """Unit for numbers up to `largest`."""
    return next((unit for unit in reversed(_COUNTS) if largest >= 5 * unit.size), _COUNTS[0])


def time_unit(largest: float) -> Unit:
    """Unit for seconds up to `largest`."""
    return next((unit for unit in reversed(_TIMES) if largest >= 3 * unit.size), _TIMES[0])


def overlay(label: str, curves: Sequence[Curve], unit_of: Callable[[float], Unit], *, smooth: bool) -> Chart:
    """Chart of several curves, the x axis from 0 or their first position.

    Args:
        label: description of the chart, for screen readers.
        curves: at least one, none of them empty.
        unit_of: largest position → unit of the x axis.
        smooth: draw long curves as a running mean, with the raw values faintly behind; others with a dot per value.
    """
    values = [value for curve in curves for value in curve.values]
    ticks = nice_ticks(min(values), max(values))
    low, high = min(ticks[0], *values), max(ticks[-1], *values)
    start, end = min(0.0, *(curve.xs[0] for curve in curves)), max(curve.xs[-1] for curve in curves)
    place_x, place_y = scale(start, end, WIDTH), scale(high, low, HEIGHT)
    unit = unit_of(end)
    lines = []
    for curve in curves:
        xs, smoothed = [place_x(x) for x in curve.xs], smooth and len(curve.xs) >= SMOOTHED_FROM
        ys = [place_y(value) for value in (running_mean(curve.values) if smoothed else curve.values)]
        raw = path_data(xs, [place_y(value) for value in curve.values]) if smoothed else ""
        dots = tuple(zip(xs, ys, strict=True)) if not smooth or len(xs) == 1 else ()
        lines.append(Line(curve.name, curve.style, path_data(xs, ys), raw, dots))
    return Chart(
        label=label,
        x_ticks=[
            Tick(place_x(tick * unit.size) / WIDTH * 100, f"{tick:g} {unit.name}".strip())
            for tick in nice_ticks(start / unit.size, end / unit.size)
            if start <= tick * unit.size <= end and (unit != _COUNTS[0] or tick == round(tick))
        ],
        y_ticks=y_ticks(ticks, place_y),
        legend=[(curve.name, curve.style) for curve in curves],
        lines=lines,
        spots=_spots(curves, start, end, unit),
    )


def _spots(curves: Sequence[Curve], start: float, end: float, unit: Unit) -> list[Spot]:
    """Columns that name each curve's last value up to their right edge."""
    spots, step = [], (end - start) / _COLUMNS
    for column in range(_COLUMNS):
        edge = end if column + 1 == _COLUMNS else start + (column + 1) * step
        passed = [(curve, bisect_right(curve.xs, edge)) for curve in curves]
        texts = [f"{curve.name} {curve.values[count - 1]:.4g}" for curve, count in passed if count]
        if texts:
            at = f"{edge / unit.size:.3g} {unit.name}".strip()
            spots.append(Spot(column * WIDTH / _COLUMNS, WIDTH / _COLUMNS, f"{at}: {', '.join(texts)}"))
    return spots
