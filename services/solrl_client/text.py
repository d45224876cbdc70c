"""Text from other programs, made safe to print."""

from typing import Any

from solrl_proto.secrets import without_secrets

LONGEST_TEXT = 2000
_SHORTENED = " … (shortened)"


def printable(text: str, limit: int = LONGEST_TEXT) -> str:
    r"""The text on one line: control and format characters are escaped (`\x1b`), and its end is cut off at `limit`.

    A terminal would execute escape sequences in a service's text. Secrets of this process are cut out.
    """
    text = without_secrets(text)
    shown = text if len(text) <= limit else text[:limit] + _SHORTENED
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in shown)


def printable_value(value: Any, limit: int = LONGEST_TEXT) -> Any:
    """A JSON value whose texts are `printable`; a value longer than `limit` becomes a shortened text."""
    if isinstance(value, str):
        return printable(value, limit)
    value = without_secrets(value)
    text = repr(value)  # repr escapes non-printable characters
    return value if len(text) <= limit else printable(text, limit)
