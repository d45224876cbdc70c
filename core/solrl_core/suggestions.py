"""Names that a mistyped name may have meant."""

from collections import defaultdict
from collections.abc import Iterable
from difflib import get_close_matches

_CUTOFF = 0.72
"""A transposed, missing or additional letter in a name of four is above it; two names of one section are below."""


def near(name: str, choices: Iterable[str]) -> list[str]:
    """At most three choices that `name` may have meant: the likeliest, and choices with the same ending.

    Dotted names are compared by their last part, in their own section first. Initials count, as in `lr` for
    `learning_rate`.
    """
    section, part = _split(name)
    choices = sorted(choices, key=lambda choice: (len(choice), choice))
    by_part: dict[str, list[str]] = defaultdict(list)
    for choice in choices:
        in_section, last = _split(choice)
        if section and not get_close_matches(section, [in_section], cutoff=_CUTOFF):
            continue
        by_part[last].append(choice)
        if "_" in last:
            by_part["".join(word[:1] for word in last.split("_"))].append(choice)
    nearest = [choice for match in get_close_matches(part, by_part, 1, _CUTOFF) for choice in by_part[match]]
    return nearest[:3] or (near(part, choices) if section else [])


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """A question for an error message, with a space before it; empty where nothing is near."""
    quoted = [repr(choice) for choice in near(name, choices)]
    return f" (did you mean {' or '.join(quoted)}?)" if quoted else ""


def _split(name: str) -> tuple[str, str]:
    section, _, part = name.lower().replace("-", "_").rpartition(".")
    return section, part
