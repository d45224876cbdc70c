"""Cancellation of a thread's requests by another thread."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Cancellation(threading.Event):
    """An event. Setting it also cancels the future that a thread waits for by `result_of` within `run`."""

    def __init__(self) -> None:
        super().__init__()
        self._awaited: Future[Any] | None = None

    def set(self) -> None:
        """Set the event, and cancel what the thread waits for. Any thread."""
        super().set()
        if (future := self._awaited) is not None:
            future.cancel()

    def result_of(self, future: Future[Result]) -> Result:
        """The result of a future, which is cancelled if the event is set, or this thread is interrupted."""
        self._awaited = future
        try:
            if self.is_set():
                future.cancel()
            return future.result()
        finally:
            self._awaited = None
            future.cancel()

    def run(self, work: Callable[Arguments, Result], /, *args: Arguments.args, **named: Arguments.kwargs) -> Result:
        """Call `work` with this as `current()`."""
        token = _current.set(self)
        try:
            return work(*args, **named)
        finally:
            _current.reset(token)


_current: ContextVar[Cancellation] = ContextVar("solrl_cancellation", default=Cancellation())  # noqa: B039


def current() -> Cancellation:
    """The cancellation of this thread's work; one that is never set outside of `Cancellation.run`."""
    return _current.get()
