"""Threads that wait for reward servers while their worker generates other chunks."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class AskingThreads:
    """Runs up to `size` tasks at a time, begun in order. Any thread may call its methods."""

    def __init__(self, size: int, on_end: Callable[[], None]) -> None:
        """`on_end` is called, on the task's thread, whenever a task has ended."""
        self._pool = ThreadPoolExecutor(size, "solrl-asking")
        self._lock = threading.Lock()
        self._tasks: list[Future[None]] = []
        """Tasks that have not ended, and those that an exception ended."""
        self._on_end = on_end

    def run(self, task: Callable[[], None]) -> Future[None]:
        """Start a task; beyond `size`, it waits for a thread, and can be cancelled. Raises as `check` does."""
        self.check()
        future = self._pool.submit(task)
        with self._lock:
            self._tasks.append(future)
        future.add_done_callback(lambda _: self._on_end())
        return future

    @property
    def idle(self) -> bool:
        """Whether all tasks have ended."""
        with self._lock:
            return all(task.done() for task in self._tasks)

    def wait(self) -> None:
        """Wait for all tasks; raises as `check` does."""
        with self._lock:
            tasks = list(self._tasks)
        for task in tasks:
            task.result()

    def check(self) -> None:
        """Raise an exception that ended a task, if there is one."""
        with self._lock:
            self._tasks = [
                task for task in self._tasks if not task.done() or not (task.cancelled() or task.exception() is None)
            ]
            ended = [task for task in self._tasks if task.done()]
        for task in ended:
            task.result()

    def close(self) -> None:
        """Wait for all tasks and end the threads."""
        self._pool.shutdown()
