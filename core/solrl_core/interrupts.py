"""Ctrl-C, answered at any moment of a program by one line and exit status 130.

`KeyboardInterrupt` does not do that: a module that is being imported may swallow it, and it waits for threads that load
a model. What these programs write survives a kill, so nothing has to be unwound.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

STATUS = 128 + signal.SIGINT
_CLEAN_LINE = b"\r\x1b[K\x1b[?25h"
"""Removes a progress line from a terminal, and shows the cursor that it hid."""

_last_words: list[str] = []


def end_at_once(words: str) -> None:
    """From now on, end the process at SIGINT with a line on stderr. A SIGINT that is ignored stays ignored."""
    _last_words.append(words)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


@contextmanager
def last_words(words: str) -> Iterator[None]:
    """Another line to end with, where `end_at_once` was called before."""
    _last_words.append(words)
    try:
        yield
    finally:
        _last_words.pop()


@contextmanager
def raised() -> Iterator[None]:
    """KeyboardInterrupt in the usual way, where something must be cleaned up, such as a child process."""
    before = signal.getsignal(signal.SIGINT)
    if before is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _end(number: int, frame: FrameType | None) -> None:
    with suppress(Exception):  # interrupted in the middle of a write
        sys.stdout.flush()
    with suppress(OSError):
        os.write(2, (_CLEAN_LINE if os.isatty(2) else b"") + _last_words[-1].encode() + b"\n")
    os._exit(STATUS)
