"""An event loop in a thread of its own. Requests of this process wait there for their answers."""

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from solrl_client.cancellation import current

Result = TypeVar("Result")

_lock = threading.RLock()  # a finalizer may come in between
_loops: dict[int, asyncio.AbstractEventLoop] = {}
"""Process id → its loop: a forked process has no thread of its parent's."""


def loop() -> asyncio.AbstractEventLoop:
    """The loop, which runs. Any thread."""
    with _lock:
        if os.getpid() not in _loops:
            new_loop = _loops[os.getpid()] = asyncio.new_event_loop()
            threading.Thread(target=new_loop.run_forever, name="solrl-background", daemon=True).start()
        return _loops[os.getpid()]


def start(work: Coroutine[Any, Any, Result]) -> "Future[Result]":
    """Begin work on the loop. Any thread."""
    return asyncio.run_coroutine_threadsafe(work, loop())


def result_of(work: Coroutine[Any, Any, Result]) -> Result:
    """Run work on the loop, and wait for its result in this thread, which must not be the loop's own.

    Raises:
        concurrent.futures.CancelledError: the thread's `Cancellation` was set, which ends the work, too.
    """
    return current().result_of(start(work))
