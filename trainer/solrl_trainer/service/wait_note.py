"""A note to a run that waits much for its service."""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median

from solrl_trainer.settings.config import RunConfig

logger = logging.getLogger(__name__)

_LIMIT = 0.15
"""Share of a run's time from which waiting is worth a change."""
_UNTIMED, _TIMED = 2, 3
"""Iterations at the start that do not count, because they compile, and the number whose median decides."""


def wasted(shares: Sequence[float]) -> float | None:
    """Share of its time that a run waits, if that is worth a change; `shares` are waited in each iteration."""
    recent = median(shares[-_TIMED:]) if len(shares) >= _UNTIMED + _TIMED else 0.0
    return recent if recent > _LIMIT else None


def wait_text(config: RunConfig, share: float) -> str:
    """Advice to a run that waits this share of its time for the service."""
    changes = [*(["start a new run with explore.lag=1"] if config.lag == 0 else []), "lower explore.share"]
    alone = ["rollout_url=null", *(["explore.lag=0"] if config.lag else [])]
    alone += ["explore.share=1"] if config.explore.share < 1 else []
    return (
        f"this run waited {100 * share:.0f} % of its time for {config.service_url}: {', '.join(changes)}, give the "
        f"service more GPUs, or drop it: --set {' '.join(alone)} (`solrl-train layout` compares)"
    )


class WaitNote:
    """Times how long this device waits for the service, and says once what to change if that is too long."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._began, self._waited = time.perf_counter(), 0.0
        self._shares: list[float] = []
        self._said = False

    @contextmanager
    def timed(self) -> Iterator[None]:
        """This device waits within the block."""
        began = time.perf_counter()
        yield
        self._waited += time.perf_counter() - began

    def end_iteration(self) -> None:
        """An iteration has ended, and the next begins."""
        now = time.perf_counter()
        self._shares.append(self._waited / (now - self._began))
        self._began, self._waited = now, 0.0
        share = None if self._said else wasted(self._shares)
        if share is not None:
            self._said = True
            logger.warning(wait_text(self._config, share))
