"""A thread for calls that may never return."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Generic, TypeVar

Result = TypeVar("Result")
_NAME = "solrl-scoring"


class ScoringThread(Generic[Result]):
    """Makes calls one after the other. The program may end before a call returns."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Result], Future[Result]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=_NAME, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], Result]) -> Future[Result]:
        """Have a call made after those submitted before."""
        future: Future[Result] = Future()
        self._calls.put((call, future))
        return future

    def end(self) -> None:
        """End the thread after its calls."""
        self._calls.put(None)

    def join(self, seconds: float) -> None:
        """Wait for its end, at most so long."""
        self._thread.join(seconds)

    def _run(self) -> None:
        while (given := self._calls.get()) is not None:
            call, future = given
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            del given, call, future  # with their images


def still_scoring() -> bool:
    """Whether a call has not returned."""
    return any(thread.name == _NAME for thread in threading.enumerate())
