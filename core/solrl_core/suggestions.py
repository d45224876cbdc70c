"""Names that a mistyped name may have meant."""

from collections.abc import Iterable
from difflib import SequenceMatcher

_LIKELY = 0.72
"""A transposed, missing or additional letter in a name of four is above it; two names of one section are below."""


def near(name: str, choices: Iterable[str], most: int = 3) -> list[str]:
    """The choices that `name` may have meant, the likeliest first.

    Dotted names are compared by their last part, since all names of a section share the first.

    Args:
        name: as it was typed.
        choices: valid names.
        most: number of names returned at most.
    """
    scored = [(_likeness(name, choice), choice) for choice in choices]
    best = max((score for score, _ in scored), default=(0.0, 0.0))
    found = sorted((score, choice) for score, choice in scored if score[0] >= max(_LIKELY, best[0] - 0.05))
    if "." in name and any(score[1] >= _LIKELY for score, _ in found):
        found = [(score, choice) for score, choice in found if score[1] >= _LIKELY]
    return [choice for _, choice in reversed(found[-most:])]


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """A question for an error message, with a space before it; empty where nothing is near."""
    found = [repr(choice) for choice in near(name, choices)]
    return f" (did you mean {' or '.join(found)}?)" if found else ""


def _likeness(name: str, choice: str) -> tuple[float, float]:
    """How much the last parts and the sections resemble each other, 0 to 1 each."""
    (given_section, given), (section, part) = _parts(name), _parts(choice)
    if given == part:
        likeness = 1.0
    elif given == "".join(word[0] for word in part.split("_") if word) and len(given) > 1:
        likeness = 0.95  # initials, as in lr for learning_rate
    elif len(given) > 2 and (part.startswith(given) or given in part.split("_")):
        likeness = 0.9
    else:
        likeness = SequenceMatcher(None, given, part).ratio()
    return likeness, SequenceMatcher(None, given_section, section).ratio()


def _parts(name: str) -> tuple[str, str]:
    section, _, part = name.lower().replace("-", "_").rpartition(".")
    return section, part
