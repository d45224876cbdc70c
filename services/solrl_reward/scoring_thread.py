"""Threads for calls that may never return."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")
_NAME = "solrl-scoring"


def in_thread(call: Callable[[], Result]) -> Future[Result]:
    """Make a call in a thread of its own. The program may end before it returns."""
    future: Future[Result] = Future()
    calls = [call]

    def run() -> None:
        try:
            result = calls.pop()()  # the call, with its images, is gone once it has returned
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=_NAME, daemon=True).start()
    return future


def still_scoring() -> bool:
    """Whether a call has not returned."""
    return any(thread.name == _NAME for thread in threading.enumerate())
