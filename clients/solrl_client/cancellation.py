"""Cancellation of a thread's requests by another thread."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Cancellation(threading.Event):
    """An event that also ends, once it is set, the requests that `TimedClient` makes within `run`."""

    def __init__(self) -> None:
        super().__init__()
        self._guard = threading.Lock()
        self._ends: list[Callable[[], object]] = []

    def set(self) -> None:
        """Set the event, and call what `calling` has registered. Any thread."""
        super().set()
        with self._guard:
            ends = list(self._ends)
        for end in ends:
            end()

    @contextmanager
    def calling(self, end: Callable[[], object]) -> Iterator[None]:
        """Have `end` called if the event is set within the block, or is set already; it must not block."""
        with self._guard:
            self._ends.append(end)
        try:
            if self.is_set():
                end()
            yield
        finally:
            with self._guard:
                self._ends.remove(end)

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
