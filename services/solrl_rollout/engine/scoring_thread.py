"""A second thread for the end of one chunk, while the first begins the next."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Beside:
    """Runs one thing at a time, in order, on a thread of its own. To be used from one thread."""

    def __init__(self, ended: Callable[[], None]) -> None:
        """`ended` is called, on the second thread, whenever something has ended."""
        self._pool = ThreadPoolExecutor(1, "solrl-scoring")
        self._last: Future[None] | None = None
        self._ended = ended

    def run(self, work: Callable[[], None]) -> None:
        """Begin `work`; raises as `wait` does, for what was begun before."""
        self.wait()
        self._last = self._pool.submit(work)
        self._last.add_done_callback(lambda _: self._ended())

    @property
    def idle(self) -> bool:
        """Whether what was begun last has ended."""
        return self._last is None or self._last.done()

    def wait(self) -> None:
        """Wait for what was begun last; what ended it, is raised here."""
        if self._last is not None:
            self._last.result()

    def check(self) -> None:
        """Raise what ended it, if it has ended."""
        if self._last is not None and self._last.done():
            self._last.result()

    def close(self) -> None:
        """Wait for it, and end the thread."""
        self._pool.shutdown()
