"""Measured relative cost of work by kind. Without it, a large model would take most of the time in equal turns."""

from collections.abc import Hashable

_NEWEST_WEIGHT = 0.1
"""Weight of the newest measurement in the running mean."""


class StepCosts:
    """Seconds per step and candidate of each kind, relative to the kind measured first. Not thread-safe."""

    def __init__(self) -> None:
        self._started: set[Hashable] = set()
        self._seconds: dict[Hashable, float] = {}

    def weight(self, kind: Hashable) -> float:
        """The relative cost of a kind; 1 until it is measured."""
        first = next(iter(self._seconds.values()), 1.0)
        return self._seconds.get(kind, first) / first

    def cost_of(self, seconds: float) -> float:
        """The number of candidate-steps, of the kind measured first, that take `seconds`; 0 until it is measured."""
        first = next(iter(self._seconds.values()), 0.0)
        return seconds / first if first else 0.0

    def record(self, kind: Hashable, seconds: float) -> None:
        """Add a measurement. The first of each kind is ignored, because it may include compilation."""
        if kind not in self._started:
            self._started.add(kind)
            return
        mean = self._seconds.get(kind, seconds)
        self._seconds[kind] = (1 - _NEWEST_WEIGHT) * mean + _NEWEST_WEIGHT * seconds
