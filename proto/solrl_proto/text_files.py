"""Text files, read alike on every machine: UTF-8 whatever the locale, with lines that end at \\n or \\r\\n alone."""

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

LARGEST = 512 * 2**20
"""Most bytes of a text file. Files of millions of prompts are smaller."""
_USUAL = 2**20


def start_in_utf8() -> None:
    """Start this program again in Python's UTF-8 mode, if the locale has only ASCII for arguments, names and output."""
    if sys.getfilesystemencoding() == "ascii" and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


class TextFileError(ValueError):
    """The content of a text file cannot be used; the message names the file."""


@contextmanager
def naming(source: str, expected: str) -> Iterator[None]:
    """Add the option or variable that named a file, and what was expected, to an OSError in the block."""
    try:
        yield
    except OSError as error:
        raise type(error)(f"got {source}: {error.strerror or error}; expected {expected}") from error


def read_text(path: Path | Traversable) -> str:
    """Read a whole file, without its byte-order mark.

    Raises:
        OSError: it cannot be read.
        TextFileError: it is not UTF-8, or has more than LARGEST bytes.
    """
    with path.open("rb") as file:
        content = file.read(_USUAL)
        if len(content) == _USUAL:  # memory is allocated before the bytes are read
            content += file.read(LARGEST)
    if len(content) > LARGEST:
        raise TextFileError(f"{path}: got more than {LARGEST // 2**20} MiB; expected a smaller text file: split it")
    return decode_text(content, path)


def decode_text(content: bytes, place: object) -> str:
    """Decode the content of a file, without its byte-order mark.

    Raises:
        TextFileError: it is not UTF-8; the message begins with `place`, and does not show the content.
    """
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _not_utf8(place, content[: error.start]) from None
    if (end := text.find("\0")) >= 0:  # UTF-16 of ASCII without a byte-order mark is valid UTF-8
        raise _not_utf8(place, text[:end].encode())
    return text


def _not_utf8(place: object, before: bytes) -> TextFileError:
    line = before.count(b"\n") + 1
    return TextFileError(f"{place}:{line}: this is not UTF-8; expected a text file in UTF-8: save it again as such")


def read_lines(path: Path) -> list[str]:
    """Read the lines of a file, without their ends. Other separators, such as U+2028, are part of a line.

    Raises:
        OSError: it cannot be read.
        TextFileError: it is not UTF-8.
    """
    lines = re.split(r"\r?\n", read_text(path))
    return lines if lines[-1] else lines[:-1]


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        OSError: it cannot be read.
        TextFileError: it is not UTF-8 or not JSON, or an object has a key twice.
    """
    return parse_json(read_text(path), path)


def parse_json(text: str, place: object) -> Any:
    """Parse JSON.

    Raises:
        TextFileError: it is not JSON, or an object has a key twice; the message begins with `place`.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        raise TextFileError(f"{place}: this is not JSON: {error}") from error
    except (ValueError, RecursionError) as error:
        raise TextFileError(f"{place}: {error}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise ValueError(f"the key {key!r} is there twice; expected it once")
        content[key] = value
    return content
