"""The reward that takes much of a run's time."""

import logging

from solrl_trainer.records.records import IterationRecord

logger = logging.getLogger(__name__)

MOST = 0.3
"""Share of an iteration."""
LEAST_S = 1.0
"""Seconds of an iteration that are worth a warning."""


class SlowRewardAlarm:
    """Warns once, from the second iteration on: the first one also loads and compiles."""

    def __init__(self) -> None:
        self._iterations = 0
        self._said = False

    def iteration(self, record: IterationRecord) -> None:
        """Warn if the scoring of this iteration is slow."""
        self._iterations += 1
        if self._iterations > 1 and not self._said and (text := slow_reward(record)):
            self._said = True
            logger.warning(text)


def slow_reward(record: IterationRecord) -> str | None:
    """Text on the scoring by this program, if it takes over `MOST` of an iteration, with what to do; else None.

    Candidates that a service scores are no part of it: their seconds are of several workers, beside each other.
    """
    concurrent = "explore" if "wait" in record.seconds else ""
    total = sum(seconds for phase, seconds in record.seconds.items() if phase not in (concurrent, "push"))
    by_reward: dict[str, float] = {}
    for time in record.scoring:
        if time.by == "trainer":
            by_reward[time.reward] = by_reward.get(time.reward, 0.0) + time.seconds
    scoring = sum(by_reward.values())
    if not total or scoring <= max(MOST * total, LEAST_S):
        return None
    slowest, seconds = max(by_reward.items(), key=lambda item: item[1])
    return (
        f"scoring takes {scoring / total:.0%} of an iteration, {scoring:.3g} of {total:.3g} s; reward "
        f"{slowest!r} takes {seconds:.3g} s of it. Score whole batches, not single images; if it has a model, on the "
        "GPU; or let a reward server compute it"
    )
