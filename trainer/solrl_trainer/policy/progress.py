"""Progress of work whose amount is known."""

from collections.abc import Callable

OnProgress = Callable[[float, float], None]
"""Called with (done, total), in any unit whose cost is about constant."""


class ProgressCounter:
    """Counts the finished parts of some work, and tells `progress`."""

    def __init__(self, total: float, progress: OnProgress) -> None:
        self._done, self._total = 0.0, total
        self._progress = progress
        progress(0, total)

    def finish(self, part: float) -> None:
        self._done += part
        self._progress(self._done, self._total)
