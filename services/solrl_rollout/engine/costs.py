"""What a step of one candidate costs, by kind of work: a large model must not take most of the time in equal turns."""

from collections.abc import Hashable

_NEWEST = 0.1
"""What the newest measurement counts of the mean."""


class Costs:
    """Costs of kinds, as multiples of that of the kind that was measured first. To be used under its owner's lock."""

    def __init__(self) -> None:
        self._begun: set[Hashable] = set()
        self._seconds: dict[Hashable, float] = {}

    def of(self, kind: Hashable) -> float:
        """The weight of a candidate's step; 1 until it is known."""
        first = next(iter(self._seconds.values()), 1.0)
        return self._seconds.get(kind, first) / first

    def measured(self, kind: Hashable, seconds: float) -> None:
        """A candidate's step of that kind took so long."""
        if kind not in self._begun:
            self._begun.add(kind)  # it may have waited for a compiler
            return
        known = self._seconds.get(kind, seconds)
        self._seconds[kind] = (1 - _NEWEST) * known + _NEWEST * seconds
