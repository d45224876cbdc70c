"""A second thread, which scores one chunk while its worker generates the next."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class ScoringThread:
    """Runs one task at a time, in order. Its methods must be called from one thread."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        """`on_end` is called, on the second thread, whenever a task has ended."""
        self._pool = ThreadPoolExecutor(1, "solrl-scoring")
        self._task: Future[None] | None = None
        self._on_end = on_end

    def run(self, task: Callable[[], None]) -> None:
        """Start a task once the previous one has ended; raises as `wait` does."""
        self.wait()
        self._task = self._pool.submit(task)
        self._task.add_done_callback(lambda _: self._on_end())

    @property
    def idle(self) -> bool:
        """Whether the last task has ended."""
        return self._task is None or self._task.done()

    def wait(self) -> None:
        """Wait for the last task; raises the exception that ended it."""
        if self._task is not None:
            self._task.result()

    def check(self) -> None:
        """Raise the exception that ended the last task, if it has ended."""
        if self.idle:
            self.wait()

    def close(self) -> None:
        """Wait for the last task and end the thread."""
        self._pool.shutdown()
