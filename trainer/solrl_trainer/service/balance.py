"""Division of regenerating between a service and this device, so that neither waits for the other."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Literal

logger = logging.getLogger(__name__)

_FIRST_SHARE = 0.5
_UNTIMED = 1
"""Iterations at the start whose times do not count, because they compile."""


class Balance:
    """Number of a rank's prompts that the service regenerates.

    With a share of "auto" it follows the times of the last iteration: moving a prompt from the service to this device
    takes its regeneration from one side and adds it to the other, so half the difference of the waits is moved.

    Attributes:
        served: number of prompts in this iteration.
    """

    def __init__(self, prompts: int, share: float | Literal["auto"]) -> None:
        """`prompts`: of this rank in each iteration."""
        self._prompts = prompts
        self._follows = share == "auto"
        self.served = max(1, round(prompts * (_FIRST_SHARE if share == "auto" else share)))
        self._began = time.perf_counter()
        self._waited = 0.0
        self._regeneration = 0.0
        self._requests = 0
        self._answered = time.perf_counter()
        self._iterations = 0
        self._lock = Lock()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """This device waits for the service within the block."""
        began = time.perf_counter()
        yield
        self._waited += time.perf_counter() - began

    @contextmanager
    def regenerating(self) -> Iterator[None]:
        """This device regenerates a prompt's samples within the block."""
        began = time.perf_counter()
        yield
        self._regeneration = time.perf_counter() - began

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
                self._answered = time.perf_counter()

    def served_in(self, seconds: float) -> None:
        """The service took so many seconds for the samples of a prompt; counts until this device has made some."""
        self._regeneration = self._regeneration or seconds

    def end_iteration(self) -> float:
        """Divide the next iteration by the times of this one, and begin to time it.

        Returns:
            The share of this iteration's time in which this device waited for the service.
        """
        now = time.perf_counter()
        share, self._began = self._waited / (now - self._began), now
        with self._lock:
            idle = 0.0 if self._requests else time.perf_counter() - self._answered
        self._iterations += 1
        if self._follows and self._iterations > _UNTIMED and self._regeneration:
            moved = round((self._waited - idle) / (2 * self._regeneration))
            served = min(self._prompts, max(0, self.served - moved))
            if served != self.served:
                logger.info(
                    "the service now regenerates %d of %d prompts: this device waited %.1f s, the service %.1f s",
                    *(served, self._prompts, self._waited, idle),
                )
            self.served = served
        self._waited = 0.0
        return share
