"""Text from elsewhere, made safe to print."""

from typing import Any

LONGEST_TEXT = 2000
_SHORTENED = " … (shortened)"


def printable(text: str, limit: int = LONGEST_TEXT) -> str:
    r"""The text on one line: control and format characters are escaped (`\x1b`), and its end is cut off at `limit`.

    A terminal would obey the escape sequences of a text that a service sent.
    """
    shown = text if len(text) <= limit else text[:limit] + _SHORTENED
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in shown)


def printable_value(value: Any, limit: int = LONGEST_TEXT) -> Any:
    """A JSON value whose texts are `printable`; one that is longer than `limit` as a whole becomes a shortened text."""
    if isinstance(value, str):
        return printable(value, limit)
    text = repr(value)  # repr escapes what is not printable
    return value if len(text) <= limit else printable(text, limit)
