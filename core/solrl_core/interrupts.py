"""Ctrl-C handling: at any moment, one line on stderr and exit status 130.

`KeyboardInterrupt` is not enough: a module that is being imported may swallow it, and it waits for threads that load
a model. Every file that these programs write survives a kill, so the process can exit without clean-up.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT
"""Exit status after Ctrl-C."""
_CLEAN_LINE = b"\r\x1b[K\x1b[?25h"
"""Removes a progress line from a terminal, and shows the cursor again."""

_messages: list[str] = []


def exit_on_interrupt(message: str) -> None:
    """From now on, exit at SIGINT and print `message` on stderr. An ignored SIGINT stays ignored."""
    _messages.append(message)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


@contextmanager
def interrupt_message(message: str) -> Iterator[None]:
    """Within the block, print this message instead of that of `exit_on_interrupt`."""
    _messages.append(message)
    try:
        yield
    finally:
        _messages.pop()


@contextmanager
def keyboard_interrupts() -> Iterator[None]:
    """Within the block, SIGINT raises KeyboardInterrupt, for work that needs clean-up, such as a child process."""
    before = signal.getsignal(signal.SIGINT)
    if before is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _exit(number: int, frame: FrameType | None) -> None:
    with suppress(Exception):  # SIGINT may arrive in the middle of a write
        sys.stdout.flush()
    with suppress(OSError):
        os.write(2, (_CLEAN_LINE if os.isatty(2) else b"") + _messages[-1].encode() + b"\n")
    os._exit(INTERRUPTED)
