"""Curves of a run's iterations, thinned to what a screen can show; whole ones are kept in the store."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from solrl_proto.status import Curve, Point

from solrl_rollout.store import AdapterStore

MOST_POINTS = 120
_KEPT = 1024  # curves of this process, a few kilobytes each
_DIGITS = 5


class Curves:
    """The overview curves of runs, made anew only when a run has told something new."""

    def __init__(self, store: AdapterStore) -> None:
        self._store = store
        self._made: OrderedDict[tuple[str, str], tuple[int, Curve]] = OrderedDict()

    async def overview(self, tenant: str, run: str, revision: int) -> Curve:
        """The run's score as it stood at `revision`, or later.

        Raises:
            ProblemError: 404 `run-not-found`.
        """
        known = self._made.get((tenant, run))
        if known is None or known[0] != revision:
            known = revision, overview(await self._store.iterations(tenant, run))
            self._made[tenant, run] = known
        self._made.move_to_end((tenant, run))
        while len(self._made) > _KEPT:
            self._made.popitem(last=False)
        return known[1]


def overview(points: Sequence[Point]) -> Curve:
    """The score alone."""
    return _curve(thinned(points), {})


def detail(points: Sequence[Point]) -> Curve:
    """Score, loss, each reward, and seconds by phase."""
    shown = thinned(points)
    series: dict[str, list[float | None]] = {"loss": [point.loss for point in shown]}
    for name in _names(point.rewards for point in shown):
        found = (point.rewards.get(name) for point in shown)
        series[f"reward:{name}"] = [spread.mean if spread else None for spread in found]
    for name in _names(point.seconds for point in shown):
        series[f"seconds:{name}"] = [point.seconds.get(name) for point in shown]
    return _curve(shown, series)


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> Sequence[Point]:
    """At most `most` (≥ 3) of the points, chosen by largest triangles over all four series of the score at once.

    Every point kept is one that was measured, first and last among them. (Steinarsson, 2013; the areas of the series
    are added, each series scaled to its own range.)
    """
    if len(points) <= most:
        return points
    x = np.array([point.iteration for point in points], float)
    y = np.array([[p.score.best, p.score.mean, p.score.worst, p.proxy_mean] for p in points], float).T
    x = (x - x[0]) / max(x[-1] - x[0], 1.0)
    y = y / np.maximum(np.ptp(y, axis=1, keepdims=True), 1e-12)
    edges = np.linspace(1, len(points) - 1, most - 1).astype(int)
    kept = [0]
    for i, (start, end) in enumerate(pairwise(edges)):
        after = slice(end, edges[i + 2] if i + 2 < len(edges) else len(points))
        ahead_x, ahead_y = x[after].mean(), y[:, after].mean(axis=1, keepdims=True)
        at = kept[-1]
        areas = (x[at] - ahead_x) * (y[:, start:end] - y[:, at : at + 1]) - (x[at] - x[start:end]) * (
            ahead_y - y[:, at : at + 1]
        )
        kept.append(int(start + np.abs(areas).sum(axis=0).argmax()))
    return [points[i] for i in (*kept, len(points) - 1)]


def _curve(points: Sequence[Point], more: dict[str, list[float | None]]) -> Curve:
    series: dict[str, list[float | None]] = {
        "best": [point.score.best for point in points],
        "mean": [point.score.mean for point in points],
        "worst": [point.score.worst for point in points],
        "proxy": [point.proxy_mean for point in points],
    }
    return Curve(
        iterations=tuple(point.iteration for point in points),
        series={name: tuple(map(_short, values)) for name, values in (series | more).items()},
    )


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{_DIGITS}g}")


def _names(found: Any) -> list[str]:
    return list(dict.fromkeys(name for names in found for name in names))
