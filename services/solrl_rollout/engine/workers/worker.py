"""The protocol between the engine and its workers.

A worker holds all models and rewards of the settings on one device. It takes chunks, generates and scores them, in a
thread of this process, in another process, or on another machine. Fairness, limits, and what to do when a worker dies
belong to the engine.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

from solrl_proto.problems import ProblemError

from solrl_rollout.engine.work import Chunk, HostedModel, Job, ScoredChunk


class WorkerDiedError(Exception):
    """A worker has died and can be loaded again.

    Attributes:
        chunks: the chunks that it had begun and not finished.
    """

    def __init__(self, detail: str, chunks: Sequence[Chunk]) -> None:
        super().__init__(detail)
        self.chunks = tuple(chunks)


class ChunkQueue(ABC):
    """The engine, as one worker sees it. Only the worker's own thread calls `wait_for_chunk` and `wait`.

    That thread sleeps on a condition until there is a chunk for it.
    """

    def __init__(self, changed: threading.Condition) -> None:
        """`changed`: notified when there may be a chunk, and when the scheduler closes."""
        self._changed = changed
        self._woken = False

    @property
    @abstractmethod
    def closing(self) -> bool:
        """Whether no more chunks will come. Called with `changed` held."""

    @abstractmethod
    def next_chunk(self) -> Chunk | None:
        """Take the worker's next chunk, if there is one now. Called with `changed` held."""

    @abstractmethod
    def finish(self, chunk: Chunk, scored: ScoredChunk) -> None:
        """Resolve a taken chunk with its result; any thread may call this."""

    @abstractmethod
    def fail(self, chunk: Chunk, error: ProblemError) -> None:
        """Resolve a taken chunk with an error of its request; any thread may call this."""

    def wait_for_chunk(self, on_wake: Callable[[], None]) -> Chunk | None:
        """Wait for the worker's next chunk; None once the engine closes.

        Calls `on_wake` before each sleep and after each `wake`; errors of `on_wake` are raised.
        """
        while True:
            on_wake()
            with self._changed:
                if self.closing:
                    return None
                if (chunk := self.next_chunk()) is not None:
                    return chunk
                self._sleep()

    def wait(self, until: Callable[[], bool], on_wake: Callable[[], None]) -> None:
        """Wait until `until()`, evaluated after each `wake`. Calls `on_wake` as `wait_for_chunk` does."""
        while True:
            on_wake()
            with self._changed:
                if until():
                    return
                self._sleep()

    def wake(self) -> None:
        """Wake the worker's thread from `wait_for_chunk` or `wait`; any thread may call this."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def _sleep(self) -> None:
        """Sleep until a change, unless there was one since the last sleep. The caller holds `changed`."""
        if not self._woken:
            self._changed.wait()
        self._woken = False


class Worker(Protocol):
    """Generates and scores chunks on one device. The engine calls `load` and `run` in a thread of the worker's own."""

    @property
    def name(self) -> str:
        """Its name in logs and metrics, e.g. "cuda:1"."""

    def load(self) -> list[HostedModel]:
        """Load and warm up all models; again after a `WorkerDiedError`.

        Raises:
            ValueError, OSError, RuntimeError: a model or a reward cannot be loaded or does not fit.
        """

    def run(self, queue: ChunkQueue) -> None:
        """Take, generate and score chunks until the engine closes; finish none after the end of this call.

        Raises:
            WorkerDiedError: it can be loaded again.
            BaseException: it cannot.
        """

    def cancel(self, job: Job) -> None:
        """Stop the chunks of a job, whose `cancelled` is set, at their next step. Never blocks; any thread."""

    def ping(self) -> Future[None]:
        """Return a future that the worker resolves before its next step. Called only while it runs; never blocks."""

    def kill(self) -> None:
        """End what runs, where that is another process, so that `run` ends; any thread."""

    def close(self) -> None:
        """Free everything that `load` made, after the end of `run`, and resolve all pings; may be called again.

        During `load`, in another thread, it may end the loading with an error. `load` is not called afterwards.
        """
