"""Alarm for a training that collapses: figures that a run seldom recovers from."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

logger = logging.getLogger(__name__)

WINDOW = 5
"""Iterations that a figure is averaged over: one batch of prompts may be easy, or alike."""
FALLEN = 2
"""Iterations in a row whose best samples score less than the worst of the run's first iteration, which are the base's.
One may have hard prompts. Iterations of other mean weights have scores of another scale. A run that breaks in its first
update falls further than the base's samples are apart."""
LEAST_SPREAD = 0.1
"""Share of the spread of the run's first iterations. Advantages are divided by it, so ten times less spread is ten
times the noise of scoring in them."""
MOST_DRIFT = 10.0
"""Growth of a squared distance between two windows. A policy that moves evenly multiplies it by 3 from the second
window to the third, and by less later; a policy that diverges, by orders of magnitude."""
TIE_TOLERANCE = 1e-9
"""Squared distances up to this are rounding: a single optimiser step begins on the behaviour policy."""
MOST_CLIPPED = 0.9
"""Points beyond the clip range, which mostly have no gradient, of those that can be: the first optimiser step begins on
the behaviour policy, so none of its points is."""
_DISTANCES = {
    "objective/kl": "the distance to the reference",
    "objective/old_kl": "the distance to the behaviour policy",
    "objective/old_distance": "the distance to the behaviour policy",
}
_SMALLER = "lower optimizer.learning_rate, or raise algorithm.kl_weight where the algorithm has one"


def collapse(lines: Sequence[Mapping[str, Any]], steps: int = 1) -> str | None:
    """Text on what looks like a collapse after the newest of a run's iterations, with what to change; None if nothing.

    `lines` are those of the iterations in metrics.jsonl, in their order; `steps` are optimiser steps per iteration.
    """
    recent = lines[1:][-FALLEN:]
    alike = all(line.get("weights") == lines[0].get("weights") for line in recent)
    if len(recent) == FALLEN and alike and all(_best(line) < lines[0]["reward_worst"] for line in recent):
        return (
            f"the best samples of a prompt score {_mean(recent, _best):.3g}, and the worst of the first iteration "
            f"{lines[0]['reward_worst']:.3g}: the model has lost what it could do. Go back, and {_SMALLER}"
        )
    if len(lines) < WINDOW:
        return None
    first, before, last = lines[:WINDOW], lines[-2 * WINDOW : -WINDOW], lines[-WINDOW:]
    spread, at_first = _mean(last, _spread), _mean(first, _spread)
    if len(lines) >= 2 * WINDOW and at_first > 0 and spread < LEAST_SPREAD * at_first:
        return (
            f"the best and worst samples of a prompt score {spread:.3g} apart, and at first {at_first:.3g}: its images "
            f"are alike, or the reward is at its limit. Look at the held-out images; {_SMALLER}"
        )
    for name, distance in _DISTANCES.items() if len(lines) >= 3 * WINDOW else ():
        if all(name in line for line in (*before, *last)):
            earlier, now = (_mean(part, lambda line, name=name: line[name]) for part in (before, last))
            if earlier > 0 and now > max(MOST_DRIFT * earlier, TIE_TOLERANCE):
                return f"{distance} has grown from {earlier:.3g} to {now:.3g} ({name}): the policy diverges. {_SMALLER}"
    # Without ratios, as with DiffusionNFT, it is the share of advantages that are clipped.
    if all({"objective/ratio", "objective/clipped"} <= line.keys() for line in last):
        clipped = _mean(last, lambda line: line["objective/clipped"])
        if clipped > MOST_CLIPPED * max(1, steps - 1) / steps:
            return (
                f"{100 * clipped:.0f} % of all points are beyond the clip range (objective/clipped) and have no "
                f"gradient: {_SMALLER}, or take fewer optimizer.updates"
            )
    return None


class CollapseAlarm:
    """Warns once, with the checkpoints to go back to."""

    def __init__(self, steps: int = 1) -> None:
        """`steps`: optimiser steps per iteration."""
        self._steps = steps
        self._said = False
        self._lines: list[Mapping[str, Any]] = []

    def start(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """The run continues after these iterations, whose rewards are its own; `lines` as for `collapse`."""
        self._lines = [*lines[:WINDOW], *lines[WINDOW:][-2 * WINDOW :]]

    def iteration(self, line: Mapping[str, Any]) -> None:
        """An iteration has ended, with this line of metrics.jsonl."""
        if self._said:
            return
        # `collapse` compares the first window with the last two.
        self.start([*self._lines, line])
        symptom = collapse(self._lines, self._steps)
        if symptom is not None:
            self._said = True
            logger.warning(
                f"this run may be collapsing at version {line['version']}: {symptom}; `--resume` with "
                "`--checkpoint` continues from an earlier version"
            )


def _best(line: Mapping[str, Any]) -> float:
    return float(line["reward_best"])


def _spread(line: Mapping[str, Any]) -> float:
    return float(line["reward_best"] - line["reward_worst"])


def _mean(lines: Sequence[Mapping[str, Any]], value: Any) -> float:
    return float(sum(map(value, lines)) / len(lines))
