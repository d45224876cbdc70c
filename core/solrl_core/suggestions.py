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
    likely = sorted((score, choice) for score, choice in scored if score[0] >= max(_LIKELY, best[0] - 0.05))
    if "." in name and any(score[1] >= _LIKELY for score, _ in likely):
        likely = [(score, choice) for score, choice in likely if score[1] >= _LIKELY]
    return [choice for _, choice in reversed(likely[-most:])]


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """A question for an error message, with a space before it; empty where nothing is near."""
    quoted = [repr(choice) for choice in near(name, choices)]
    return f" (did you mean {' or '.join(quoted)}?)" if quoted else ""


def _likeness(name: str, choice: str) -> tuple[float, float]:
    """How much the last parts and the sections resemble each other, 0 to 1 each."""
    (typed_section, typed), (section, part) = _parts(name), _parts(choice)
    if typed == part:
        likeness = 1.0
    elif typed == "".join(word[0] for word in part.split("_") if word) and len(typed) > 1:
        likeness = 0.95  # initials, as in lr for learning_rate
    elif len(typed) > 2 and (part.startswith(typed) or typed in part.split("_")):
        likeness = 0.9
    else:
        likeness = SequenceMatcher(None, typed, part).ratio()
    return likeness, SequenceMatcher(None, typed_section, section).ratio()


def _parts(name: str) -> tuple[str, str]:
    section, _, part = name.lower().replace("-", "_").rpartition(".")
    return section, part
