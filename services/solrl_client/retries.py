"""Pauses between the tries of a request."""

import time


class Retries:
    """The tries of one request. Pauses grow until another one would exceed the patience.

    Attributes:
        tries: number of tries so far.
    """

    def __init__(self, patience: float, pause: float = 0.5, longest: float = 10.0) -> None:
        """Begin the first try.

        Args:
            patience: seconds from now within which another try may begin.
            pause: seconds before the second try; doubled before each further one.
            longest: most seconds of a pause, unless the server asks for more.
        """
        self.tries = 1
        self._patience = patience
        self._least = self._pause = pause
        self._longest = longest
        self._began = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds since the first try."""
        return time.monotonic() - self._began

    def pause(self, after: float | None = None) -> float | None:
        """Seconds to wait before another try, which is counted; None if the patience would be over.

        `after`: the server's Retry-After, in place of a growing pause.
        """
        seconds = max(after, self._least) if after else self._pause
        if self.elapsed + seconds > self._patience:
            return None
        self._pause = min(2 * self._pause, self._longest)
        self.tries += 1
        return seconds
