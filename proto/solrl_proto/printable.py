"""Texts of faults, and text from other programs and of their exceptions, made safe to print."""

import linecache
import logging
import sys
import traceback
from typing import Any

from solrl_proto.secrets import changed_texts, without_secrets

LONGEST_TEXT = 2000
_SHORTENED = " … (shortened)"


def printable(text: str, limit: int = LONGEST_TEXT) -> str:
    r"""The text on one line: control and format characters are escaped (`\x1b`), and its end is cut off at `limit`.

    A terminal would execute escape sequences in a service's text. Secrets of this process are cut out.
    """
    text = without_secrets(text)
    shortened = text if len(text) <= limit else text[:limit] + _SHORTENED
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in shortened)


def print_error(program: str, message: str) -> None:
    """Print a program's last message on stderr, each of its lines `printable`."""
    print(f"{program}: " + "\n".join(map(printable, message.splitlines())), file=sys.stderr)


def fault_text(fault: str, where: str | None, got: Any, expected: Any, action: str | None) -> str:
    """A fault in one line: "Adapter refused: …; at lora_A; got 'float16'; expected 'float32'; convert it"."""
    parts = [fault]
    parts += [f"at {where}"] if where else []
    parts += [f"got {got!r}"] if got is not None else []
    parts += [f"expected {expected!r}"] if expected is not None else []
    parts += [action] if action else []
    return "; ".join(parts)


def error_text(error: Exception) -> str:
    """The text of an error that ends a program; one of the system gets what to do about it."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}; check this path, its permissions, and the option that gives it"
    if isinstance(error, MemoryError) or "can't start new thread" in str(error):
        return (
            f"{str(error) or 'out of memory'}: too little memory, or too many threads; raise `ulimit -v` and "
            "`ulimit -u`, or the container's limits"
        )
    if _is_fault_of_code(error):
        return f"{type(error).__name__}: {error}; SOLRL_TRACEBACK=1 shows where"
    return str(error)


def _is_fault_of_code(error: Exception) -> bool:
    """Whether Python or a library raised an error, without a text for the program's user."""
    kinds = (AssertionError, AttributeError, LookupError, NameError, RuntimeError, TypeError, ZeroDivisionError)
    if type(error).__module__ != "builtins" or not isinstance(error, kinds):
        return False
    for frame, line in list(traceback.walk_tb(error.__traceback__))[-1:]:
        ours = str(frame.f_globals.get("__name__")).startswith("solrl_")
        return not (ours and linecache.getline(frame.f_code.co_filename, line).strip().startswith("raise "))
    return True


class PrintableFormatter(logging.Formatter):
    """Records of a log, with tracebacks, in `printable` lines."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(map(printable, super().format(record).splitlines()))


def printable_value(value: Any) -> Any:
    """A JSON value whose texts are `printable`; a value longer than `LONGEST_TEXT` becomes a shortened text."""
    content = printable_texts(value)
    return content if isinstance(content, str) or len(repr(content)) <= LONGEST_TEXT else printable(repr(content))


def printable_texts(value: Any, limit: int = LONGEST_TEXT) -> Any:
    """A JSON value with each of its texts and names `printable`."""
    return changed_texts(value, lambda text: printable(text, limit))
