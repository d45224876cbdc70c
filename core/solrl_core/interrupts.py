"""Ctrl-C handling: at any moment, one line on stderr and exit status 130.

`KeyboardInterrupt` is not enough: a module that is being imported may swallow it, and it waits for threads that load
a model. Every file that these programs write survives a kill, so the process can exit without clean-up. Where clean-up
is needed, `unwinding` raises an exception, but never within an import.
"""

import _thread
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

INTERRUPTED = 128 + signal.SIGINT
"""Exit status after Ctrl-C."""
_CLEAN_LINE = b"\r\x1b[K\x1b[?25h"
"""Removes a progress line from a terminal, and shows the cursor again."""
_LATER = 0.05
"""Seconds until a signal within an import is sent again."""

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
def unwinding(*numbers: signal.Signals) -> Iterator[None]:
    """Within the block, these signals raise an exception, for work that needs clean-up, such as a child process.

    SIGINT raises KeyboardInterrupt, another signal SystemExit; an ignored one stays ignored. A signal that arrives
    within an import is handled after it: an exception there may be swallowed, or leave the lock of all imports held, so
    that every later import waits forever.
    """
    before = {number: signal.getsignal(number) for number in numbers}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, _raise_after_imports)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _raise_after_imports(number: int, frame: FrameType | None) -> None:
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    if frame is None:
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
    _thread.start_new_thread(_send_later, (number,))


def _send_later(number: int) -> None:
    time.sleep(_LATER)
    os.kill(os.getpid(), number)


def leave(message: str, code: int) -> NoReturn:
    """Exit at once, without clean-up; a message, if not empty, goes to stderr below what a terminal shows."""
    with suppress(Exception):  # a signal may arrive in the middle of a write
        sys.stdout.flush()
    if message:
        with suppress(OSError):
            os.write(2, (_CLEAN_LINE if os.isatty(2) else b"") + message.encode() + b"\n")
    os._exit(code)


def _exit(number: int, frame: FrameType | None) -> None:
    leave(_messages[-1], INTERRUPTED)
