"""Axes of the report's charts: scales from values to the plot, and round numbers for ticks."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 1000.0, 400.0
MOST_WHOLE = 8
"""Largest span of whole numbers in which every number has a tick."""


@dataclass(frozen=True)
class Tick:
    """A label, positioned at `at` per cent from the left or from the top."""

    at: float
    text: str


def scale(start: float, end: float, length: float) -> Callable[[float], float]:
    """Linear map from `start` … `end` to 0 … `length`; to the middle if both are equal."""
    span = end - start
    return lambda value: (value - start) / span * length if span else length / 2


def nice_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """At most `most` + 1 round numbers in steps of 1, 2 or 5 that span `low` to `high`."""
    if high <= low:
        spread = abs(low) * 0.1 or 1.0
        low, high = low - spread, high + spread
    rough = (high - low) / (most - 1)
    magnitude = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * magnitude for factor in (1, 2, 5, 10) if factor * magnitude >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def x_ticks(xs: Sequence[int], place: Callable[[float], float]) -> list[Tick]:
    """Ticks at whole numbers, always including the first and the last of `xs`."""
    if len(xs) == 1:
        return [Tick(place(xs[0]) / WIDTH * 100, str(xs[0]))]
    if xs[-1] - xs[0] <= MOST_WHOLE:
        return [Tick(place(x) / WIDTH * 100, str(x)) for x in range(xs[0], xs[-1] + 1)]
    wanted = [tick for tick in nice_ticks(xs[0], xs[-1]) if xs[0] <= tick <= xs[-1]]
    # The ends show the extent of the run; drop round numbers whose labels would overlap with theirs.
    near = (xs[-1] - xs[0]) * 0.08
    inner = [round(tick) for tick in wanted if xs[0] + near < tick < xs[-1] - near]
    return [Tick(place(x) / WIDTH * 100, str(x)) for x in (xs[0], *inner, xs[-1])]


def y_ticks(ticks: Sequence[float], place: Callable[[float], float]) -> list[Tick]:
    """Labels of `ticks`, with as many decimals as needed to distinguish them."""
    step = ticks[1] - ticks[0]
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return [Tick(place(tick) / HEIGHT * 100, f"{tick + 0.0:.{digits}f}") for tick in ticks]
