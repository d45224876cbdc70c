"""Seconds that rewards took in an iteration, and where they ran."""

from collections.abc import Mapping
from typing import Literal

from solrl_proto.rollouts import RewardTime
from solrl_proto.status import ScoringTime

Images = Literal["candidates", "samples"]
"""Explored candidates, or the samples that are trained on."""
By = Literal["service", "trainer"]


class RewardClock:
    """Sums the seconds of each reward by its images and its place."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[Images, By, str, str | None], float] = {}

    def restart(self) -> None:
        """Forget all seconds, at the beginning of an iteration."""
        self._seconds.clear()

    def add(self, of: Images, by: By, times: Mapping[str, RewardTime]) -> None:
        """Add the times of rewards by name; `by`: the program that computed them, or asked their servers."""
        for name, one in times.items():
            place = of, by, name, one.server
            self._seconds[place] = self._seconds.get(place, 0.0) + one.seconds

    @property
    def times(self) -> tuple[ScoringTime, ...]:
        """The sums, those of candidates first."""
        found = sorted(self._seconds.items(), key=lambda item: item[0][0])
        return tuple(
            ScoringTime(of=of, by=by, reward=name, server=server, seconds=round(seconds, 4))
            for (of, by, name, server), seconds in found
        )
