"""Curves of a run's iterations and held-out evaluations, thinned for display. The store keeps every iteration."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
from solrl_proto.status import Curve, HeldOut, Point, RunSettings

from solrl_rollout.store import RunStore

MOST_POINTS = 120
_CACHED_CURVES = 1024  # a few kilobytes each
_DIGITS = 5
_MOST_NAMES = 32  # of rewards, and of phases: each is a series over all points of the curve

Item = TypeVar("Item")
Overview = tuple[Curve, tuple[HeldOut, ...]]
"""The score, and the first and the newest held-out evaluation."""


class OverviewCurves:
    """The overview curves of runs, cached until a run reports again."""

    def __init__(self, store: RunStore) -> None:
        self._store = store
        self._cached: dict[tuple[str, str], tuple[int, Overview]] = {}

    async def overview(self, tenant: str, run: str, revision: int) -> Overview:
        """The run's score curve and held-out figures at `revision` or later.

        Raises:
            RunNotFoundError.
        """
        cached = self._cached.get((tenant, run))
        if cached is None or cached[0] != revision:
            points = await self._store.iterations(tenant, run)
            cached = revision, (_curve(thinned(points), {}), newest_evaluations(points))
            self._cached[tenant, run] = cached
            if len(self._cached) > _CACHED_CURVES:
                del self._cached[next(iter(self._cached))]
        return cached[1]


def evaluations(points: Sequence[Point]) -> tuple[HeldOut, ...]:
    """Held-out evaluations by version, thinned."""
    by_version = {evaluation.version: evaluation for point in points for evaluation in point.held_out}
    return tuple(by_version[version] for version in thinned(sorted(by_version)))


def newest_evaluations(points: Sequence[Point]) -> tuple[HeldOut, ...]:
    """The first and the last held-out evaluation, of their first reward alone."""
    held_out = evaluations(points)
    ends = (held_out[0], held_out[-1]) if len(held_out) > 1 else held_out
    return tuple(end.model_copy(update={"rewards": dict([next(iter(end.rewards.items()))])}) for end in ends)


def settings(points: Sequence[Point]) -> RunSettings | None:
    return next((point.settings for point in reversed(points) if point.settings is not None), None)


def detail(points: Sequence[Point]) -> Curve:
    """A curve of score, loss, rank fidelity, each reward, and seconds of all points of a run, thinned.

    `elapsed` and `spearman` also depend on points that are not shown.
    """
    visible = thinned(points)
    elapsed = dict(zip((point.iteration for point in points), accumulate(map(_own_seconds, points)), strict=True))
    series: dict[str, list[float | None]] = {
        "loss": [point.loss for point in visible],
        "elapsed": [elapsed[point.iteration] for point in visible],
    }
    if any(point.spearman is not None for point in points):
        newest = _newest_spearman(points)
        series["spearman"] = [newest[point.iteration] for point in visible]
    for name in _names(point.rewards for point in visible):
        spreads = (point.rewards.get(name) for point in visible)
        series[f"reward:{name}"] = [spread.mean if spread else None for spread in spreads]
    for name in _names(point.seconds for point in visible):
        series[f"seconds:{name}"] = [point.seconds.get(name) for point in visible]
    return _curve(visible, series)


def thinned(items: Sequence[Item]) -> Sequence[Item]:
    """At most `MOST_POINTS` of the items at even distances, among them the first and the last."""
    if len(items) <= MOST_POINTS:
        return items
    return [items[i] for i in np.linspace(0, len(items) - 1, MOST_POINTS).round().astype(int)]


def _curve(points: Sequence[Point], more: dict[str, list[float | None]]) -> Curve:
    series: dict[str, list[float | None]] = {
        "best": [point.score.best for point in points],
        "mean": [point.score.mean for point in points],
        "worst": [point.score.worst for point in points],
        "proxy": [point.proxy_mean for point in points],
    }
    return Curve(
        iterations=tuple(point.iteration for point in points),
        series={name: tuple(map(_rounded, values)) for name, values in (series | more).items()},
    )


def _own_seconds(point: Point) -> float:
    """Seconds of an iteration; exploration during other phases counts only as the trainer's wait for it."""
    return sum(seconds for phase, seconds in point.seconds.items() if phase != "explore" or "wait" not in point.seconds)


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{_DIGITS}g}")


def _newest_spearman(points: Sequence[Point]) -> dict[int, float | None]:
    """The newest rank fidelity at each iteration: it is measured more rarely than points are drawn."""
    newest, at_iteration = None, {}
    for point in points:
        newest = newest if point.spearman is None else point.spearman
        at_iteration[point.iteration] = newest
    return at_iteration


def _names(mappings: Any) -> list[str]:
    return list(dict.fromkeys(name for names in mappings for name in names))[:_MOST_NAMES]
