"""Settings that are gone, and what to do instead."""

from collections.abc import Mapping
from typing import Any

_HERE = "the trainer's device regenerates every sample"
REMOVED: dict[str, tuple[tuple[Any, ...], str]] = {
    "regenerate.share": (("auto",), f"{_HERE}; omit it"),
    "optimizer.streamed": ((True, False), "every iteration waits for all its samples; omit it"),
    "optimizer.reference": (("bf16",), "the reference's velocities are computed in BF16; omit it"),
    "explore.frames": ((None,), "candidates that are cut short rank by chance; omit it"),
    "explore.refill": ((0,), "expected harder or easier prompts, or a graded reward, and no explore.refill"),
}
"""Setting → the values without an effect, which settings of earlier runs have, and what to do instead of others."""
_VALUES = {
    ("regenerate.at", "service"): f"{_HERE}; expected regenerate.at=trainer, and the service explores",
    (
        "explore.share",
        "auto",
    ): "expected a number; `solrl-train layout` computes one that leaves neither side waiting",
}
"""Settings that remain, with a value that is gone."""


def removal(key: str, value: Any) -> str | None:
    """What to do instead of a setting or value that is gone; None if it is not, or had no effect."""
    if key in REMOVED:
        neutral, advice = REMOVED[key]
        return None if value in neutral else advice
    return _VALUES.get((key, value)) if isinstance(value, str) else None


def without_removed(settings: Any) -> Any:
    """Settings in sections without those that are gone.

    Raises:
        ValueError: one of them had an effect, or a value is gone; says what to do instead.
    """
    if not isinstance(settings, Mapping):
        return settings
    kept = dict(settings)
    for key in (*REMOVED, *(key for key, _ in _VALUES)):
        section, _, name = key.partition(".")
        values = kept.get(section)
        if isinstance(values, Mapping) and name in values:
            if advice := removal(key, values[name]):
                raise ValueError(f"{key} is {values[name]}, which is gone: {advice}")
            if key in REMOVED:
                kept[section] = {other: value for other, value in values.items() if other != name}
    return kept
