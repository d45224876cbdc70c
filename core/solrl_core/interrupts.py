"""Handling of Ctrl-C: at any moment, one line and exit status 130.

`KeyboardInterrupt` is not enough: a module that is being imported may swallow it, and it waits for threads that load
a model. All files that these programs write survive a kill, so nothing has to be unwound.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

STATUS = 128 + signal.SIGINT
_CLEAN_LINE = b"\r\x1b[K\x1b[?25h"
"""Removes a progress line from a terminal, and shows the cursor again."""

_last_words: list[str] = []


def end_at_once(words: str) -> None:
    """End the process at SIGINT with a line on stderr, from now on. An ignored SIGINT stays ignored."""
    _last_words.append(words)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


@contextmanager
def last_words(words: str) -> Iterator[None]:
    """Change the line of a previous `end_at_once`."""
    _last_words.append(words)
    try:
        yield
    finally:
        _last_words.pop()


@contextmanager
def raised() -> Iterator[None]:
    """Restore KeyboardInterrupt within the block, for work that must be cleaned up, such as a child process."""
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
