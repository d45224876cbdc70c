"""Threads for calls that may never return."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")
NAME = "solrl-scoring"
"""Name of the scoring threads."""


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

    threading.Thread(target=run, name=NAME, daemon=True).start()
    return future
