"""The layout that a run has, in words, and advice if its GPUs wait for the service."""

import logging
from collections.abc import Sequence
from statistics import median

from solrl_trainer.settings.config import RunConfig

logger = logging.getLogger(__name__)

_WASTE = 0.15
"""Share of a run's time from which waiting is worth a change."""
_UNTIMED, _TIMED = 2, 3
"""Iterations at the start that do not count, because they compile, and the number whose median decides."""


def running_text(config: RunConfig, ranks: int, device: str) -> str:
    """The sides that explore, regenerate and train, in words.

    Args:
        config: the run's settings.
        ranks: that train together.
        device: of each, as torch names it.
    """
    served = config.regenerate.at == "service"
    here = ["explore" if config.explore.source == "model" else "encode"] if config.explores_here else []
    here += ["regenerate"] if config.two_stage and not (served and config.regenerate.share == 1) else []
    units = ("GPU", "GPUs") if device.startswith("cuda") else ("CPU process", "CPU processes")
    here = [verb if ranks > 1 else f"{verb}s" for verb in (*here, "train")]
    text = f"{ranks} {units[ranks > 1]} {_listed(here)}"
    if config.uses_service:
        there = ["explores", "regenerates"] if served else ["explores"]
        text += f"; {config.service_url} {_listed(there)} (lag {config.lag})"
    return text


def _listed(words: Sequence[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def waste(shares: Sequence[float]) -> float | None:
    """Share of its time that a run wastes, if that is worth a change; `shares` are waited in each iteration."""
    if len(shares) < _UNTIMED + _TIMED:
        return None
    recent = median(shares[-_TIMED:])
    return recent if recent > _WASTE else None


def waste_text(config: RunConfig, share: float) -> str:
    """Advice to a run that waits this share of its time for the service."""
    served, optimizer = config.regenerate.at == "service", config.optimizer
    changes = []
    if config.lag == 0:
        changes.append("start a new run with explore.lag=1")
    if served and config.regenerate.share != "auto":
        changes.append("set regenerate.share=auto")
    elif config.explore.share != "auto":  # which takes over regenerating first
        changes.append("set explore.share=auto")
    if served and optimizer.steps == 1 and not optimizer.streamed:
        changes.append("set optimizer.streamed=true")
    changes.append("give the service more GPUs")
    own = ["rollout_url=null"]
    own += ["explore.lag=0"] if config.lag else []
    own += ["regenerate.at=trainer"] if served else []
    own += ["explore.share=1"] if config.explore.share != 1 else []
    own += ["regenerate.share=auto"] if config.regenerate.share not in ("auto", 1) else []
    changes.append(f"do without it by {' '.join(own)} (`solrl-train layout` compares)")
    *first, last = changes
    return f"this run waited {100 * share:.0f} % of its time for {config.service_url}: {', '.join(first)}, or {last}"


class WasteNote:
    """Says once what to change if a run waits too much."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._shares: list[float] = []
        self._said = False

    def iteration(self, share: float) -> None:
        """An iteration of the run waited this share of its time for the service."""
        self._shares.append(share)
        found = None if self._said else waste(self._shares)
        if found is not None:
            self._said = True
            logger.warning(waste_text(self._config, found))
