"""Division of exploring and regenerating between a service and this device, so that neither waits for the other."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Literal

logger = logging.getLogger(__name__)

Share = float | Literal["auto"]
_FIRST_SHARE = 0.5
_UNTIMED = 1
"""Iterations at the start whose times do not count, because they compile."""


@dataclass
class Stage:
    """Division of one stage.

    Attributes:
        clock: gives the time in seconds.
        prompts: of this rank in each iteration.
        served: number of them at the service.
        least, most: fewest and most at the service.
        follows: whether the number follows the waits.
        seconds: of a prompt on this device; the service's until this device has made some.
    """

    clock: Callable[[], float]
    prompts: int
    served: int
    least: int
    most: int
    follows: bool
    seconds: float = 0.0

    @contextmanager
    def timed(self, prompts: int = 1) -> Iterator[None]:
        """This device does the stage of so many prompts within the block."""
        began = self.clock()
        yield
        self.seconds = (self.clock() - began) / prompts

    def served_in(self, seconds: float) -> None:
        """The service took so many seconds for a prompt; counts until this device has made some."""
        self.seconds = self.seconds or seconds

    @property
    def work(self) -> float:
        """Seconds that the service's prompts would take on this device."""
        return self.served * self.seconds

    def move(self, seconds: float) -> float:
        """Move work that takes so long on this device from the service to it, or back if negative; return the rest."""
        if not self.follows or not self.seconds:
            return seconds
        before = self.work
        self.served = min(self.most, max(self.least, self.served - round(seconds / self.seconds)))
        return seconds - before + self.work if self.served in (self.least, self.most) else 0.0


class Balance:
    """Number of a rank's prompts that the service explores and regenerates.

    A share of "auto" follows the times of the last iteration. Work that is moved from the service to this device takes
    time from one side and adds it to the other; the service may need a multiple of this device's time, by its speed,
    its number of GPUs and its other runs. What is moved is what makes both waits equal. This device takes regenerating
    first, and exploring if that is not enough. It always regenerates the first of several prompts: the service's first
    samples would not come sooner, and after the push.

    Attributes:
        explore, regenerate: the two stages.
    """

    def __init__(
        self,
        prompts: int,
        *,
        explore: Share = 1.0,
        regenerate: Share | None = "auto",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Set up a division.

        Args:
            prompts: of this rank in each iteration.
            explore: share that the service explores.
            regenerate: share that it regenerates; None for nothing.
            clock: gives the time in seconds.
        """
        # One prompt is explored here at first, so that its time is known, and what compiles does so at the start.
        first = max(1, prompts - 1 if explore == "auto" else round(prompts * explore))
        self.explore = Stage(clock, prompts, first, 1, prompts, explore == "auto")
        share = _FIRST_SHARE if regenerate == "auto" else regenerate
        served = 0 if share is None else max(1, round(prompts * share))
        most = max(1, prompts - 1) if regenerate == "auto" else prompts
        self.regenerate = Stage(clock, prompts, served, 0, most, regenerate == "auto")
        self._clock = clock
        self._waited = 0.0
        self._requests = 0
        self._began = self._answered = self._clock()
        self._iterations = 0
        self._lock = Lock()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """This device waits for the service within the block."""
        began = self._clock()
        yield
        self._waited += self._clock() - began

    @contextmanager
    def asking(self) -> Iterator[None]:
        """The service has a request of this run within the block; any thread."""
        with self._lock:
            self._requests += 1
        try:
            yield
        finally:
            with self._lock:
                self._requests -= 1
                self._answered = self._clock()

    def end_iteration(self) -> float:
        """Divide the next iteration by the times of this one, and begin to time it.

        Returns:
            The share of this iteration's time in which this device waited for the service.
        """
        now = self._clock()
        with self._lock:
            idle = 0.0 if self._requests else now - max(self._began, self._answered)
        self._iterations += 1
        if self._iterations > _UNTIMED:
            self._divide(idle, now - self._began - idle)
        share = self._waited / (now - self._began)
        self._began, self._waited = now, 0.0
        return share

    def _divide(self, idle: float, busy: float) -> None:
        """Divide by the seconds in which the service was idle, and busy with this run's requests."""
        stages = [self.regenerate, self.explore]
        work = sum(stage.work for stage in stages)
        if not work:
            return
        before = [stage.served for stage in stages]
        rest = (self._waited - idle) / (1 + busy / work)
        for stage in stages if rest > 0 else reversed(stages):
            rest = stage.move(rest)
        if before != [stage.served for stage in stages]:
            logger.info(
                f"the service now explores {self.explore.served} and regenerates {self.regenerate.served} of "
                f"{self.explore.prompts} prompts: this device waited {self._waited:.1f} s, the service {idle:.1f} s"
            )
