"""Filters of the templates: how pages say a figure."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from peer_drives.turns import BEHAVIOUR, COMPUTED

Interval = Mapping[str, float]
"""A mean with its limits, as paper.json has it."""
TITLES = {
    "ocr": "OCR",
    "clipscore": "mini-CLIPScore",
    "pickscore": "mini-PickScore",
    "hpsv2": "mini-HPSv2",
    "imagereward": "mini-ImageReward",
}
"""Reward of a miniature → its name on pages; it is a miniature, too, but for OCR."""
WORDS = ("none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def span(values: Iterable[float], digits: int = 2) -> str:
    """The smallest and the largest of some values."""
    values = sorted(values)
    low, high = (f"{value:.{digits}f}".replace("-", "−") for value in (values[0], values[-1]))
    return low if low == high else f"{low} to {high}"


def series(values: Iterable[float | str], digits: int = 2) -> str:
    """Some values, one after the other."""
    *first, last = (value if isinstance(value, str) else f"{value:.{digits}f}" for value in values)
    return f"{', '.join(first)} and {last}" if first else last


def signed(figure: Interval | float, digits: int = 2) -> str:
    """A figure with its sign, and with its interval, if it has one."""
    if not isinstance(figure, Mapping):
        return f"{figure:+.{digits}f}".replace("-", "−")
    return f"{signed(figure['mean'], digits)} [{signed(figure['low'], digits)}, {signed(figure['high'], digits)}]"


def plain(figure: Interval, sign: int = 1) -> str:
    """A mean with its interval, without a plus; −1 turns a change into a loss."""
    low, high = sorted((sign * figure["low"], sign * figure["high"]))
    return f"{sign * figure['mean']:.3f} [{low:.3f}, {high:.3f}]".replace("-", "−")


def share(figure: Interval, digits: int = 1) -> str:
    """A share with its interval, in per cent."""
    mean, low, high = (f"{100 * figure[name]:.{digits}f}".replace("-", "−") for name in ("mean", "low", "high"))
    return f"{mean} % [{low}, {high}]"


def percent(share: float, digits: int = 0) -> str:
    """A share in per cent."""
    return f"{100 * share:.{digits}f} %"


def times(figure: Interval | None) -> str:
    """A ratio with its interval, or that not all runs reach the reward."""
    return f"{figure['mean']:.2f} × [{figure['low']:.2f}, {figure['high']:.2f}]" if figure else "not by all seeds"


def decided(ratio: Interval) -> str:
    """Whether a ratio is above 1, by its interval."""
    if ratio["low"] <= 1 <= ratio["high"]:
        return "undecided"
    return "yes" if ratio["mean"] > 1 else "no"


def over(figure: Interval, cost: float) -> dict[str, float]:
    """A ratio of iterations as one of compute, where an iteration costs so many of the other's."""
    return {name: figure[name] / cost for name in ("mean", "low", "high")}


def uneven(shares: Sequence[float]) -> float:
    """The largest distance of a share from their mean, over the mean."""
    return max(abs(share / statistics.mean(shares) - 1) for share in shares)


def p99(values: Sequence[float]) -> float:
    """The 99th percentile, as load.md has it."""
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]


def word(count: int) -> str:
    """A number below ten as a word."""
    return WORDS[count]


def unlike(facts: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """What a peer's trainer does otherwise than ours, of what changes its time."""
    said = {
        "levels": f"trains {facts['levels']} noise levels, ours {ours['levels']}",
        "solver": f"solver {facts['solver']}",
        BEHAVIOUR: f"{facts[BEHAVIOUR]} log-probabilities",
        "weights": f"{facts['weights']} weights",
        "decoder": f"{facts['decoder']} decoder",
        "recomputed": f"recomputes {facts['recomputed']}",
        "sampled at once": f"draws {facts['sampled at once']} at once, ours {ours['sampled at once']}",
        "trained at once": f"trains {facts['trained at once']}, ours {ours['trained at once']}",
    }
    return ", ".join(words for name, words in said.items() if facts[name] not in (ours[name], COMPUTED))


def titled(world: str) -> str:
    """A world, its reward by its name on pages."""
    model, reward, *rest = world.split(", ")
    return ", ".join([model, TITLES[reward], *rest])


FILTERS = (
    titled,
    unlike,
    span,
    signed,
    plain,
    share,
    percent,
    times,
    decided,
    over,
    uneven,
    p99,
    word,
    statistics.median,
)
