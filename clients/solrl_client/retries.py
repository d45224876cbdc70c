"""Pauses between the tries of a request, and callbacks that report whom a program waits for."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self


@dataclass(frozen=True)
class Wait:
    """A wait for a server.

    Attributes:
        fault: why its last answer could not be used.
        waited: seconds since the first try.
        left: seconds until the last try may begin; 0 after that.
    """

    fault: str
    waited: float
    left: float


OnWait = Callable[[str, Wait | None], None]
"""Called with a server's address before each pause; with None once it has answered, or a Wait with nothing left once it
is given up. Any thread."""


def ignore(server: str, wait: Wait | None) -> None:
    """An `OnWait` that does nothing."""


class Retries:
    """The tries of one request. Pauses grow until another one would exceed the patience.

    As a context manager, it reports the end of a wait to `on_wait`.

    Attributes:
        tries: number of tries so far.
    """

    def __init__(
        self, patience: float, pause: float = 0.5, longest: float = 10.0, *, server: str = "", on_wait: OnWait = ignore
    ) -> None:
        """Begin the first try.

        Args:
            patience: seconds from now until the last try may begin.
            pause: seconds before the second try; doubled before each further one.
            longest: most seconds of a pause, unless the server asks for more.
            server: address of the server, for `on_wait`.
            on_wait: called at each pause.
        """
        self._patience = patience
        self._least = pause
        self._longest = longest
        self._server = server
        self._on_wait = on_wait
        self._waits = False
        self.renew()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._waits:
            self._on_wait(self._server, Wait("", self.elapsed, 0.0) if error else None)

    def renew(self) -> None:
        """Begin the first try again, as after progress."""
        self.tries = 1
        self._pause = self._least
        self._began = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds since the first try."""
        return time.monotonic() - self._began

    def pause(self, after: float | None = None, fault: str = "") -> float | None:
        """Seconds to wait before another try, which is counted; None if the patience would be over.

        Args:
            after: the server's Retry-After, which replaces the growing pause.
            fault: why the last try failed.
        """
        seconds = max(after, self._least) if after else self._pause
        elapsed = self.elapsed
        if elapsed + seconds > self._patience:
            return None
        self._pause = min(2 * self._pause, self._longest)
        self.tries += 1
        self._waits = True
        self._on_wait(self._server, Wait(fault, elapsed, self._patience - elapsed))
        return seconds
