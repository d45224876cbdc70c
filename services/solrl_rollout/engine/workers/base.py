"""The protocol between the engine and its workers.

A worker holds all models and rewards of the settings on one device. It takes chunks, generates and scores them, in a
thread of this process, in another process, or on another machine. Fairness, limits, and what to do when a worker dies
belong to the engine.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

from solrl_rollout.engine.work import Chunk, HostedModel, Job, ScoredChunk


class WorkerDiedError(Exception):
    """A worker has died and can be loaded again.

    Attributes:
        chunks: the chunks that it had begun and not finished.
    """

    def __init__(self, detail: str, chunks: Sequence[Chunk]) -> None:
        super().__init__(detail)
        self.chunks = tuple(chunks)


class Feed(Protocol):
    """The engine, as one worker sees it. Only the worker's own thread calls `take` and `wait`."""

    def take(self, attend: Callable[[], None]) -> Chunk | None:
        """Wait for the worker's next chunk; None once the engine closes.

        `attend` is called before each time that this sleeps, and after each `wake`; if it raises, this raises the same.
        """

    def wait(self, until: Callable[[], bool], attend: Callable[[], None], timeout: float | None = None) -> None:
        """Wait until `until()`, which is evaluated after each `wake`, or for `timeout` seconds; `attend` as above."""

    def wake(self) -> None:
        """Wake the worker's thread from `take` or `wait`; any thread may call this."""

    def finish(self, chunk: Chunk, scored: ScoredChunk) -> None:
        """Resolve a taken chunk with its result; any thread may call this."""

    def fail(self, chunk: Chunk, error: Exception) -> None:
        """Resolve a taken chunk with an error of its request; any thread may call this."""


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

    def run(self, feed: Feed) -> None:
        """Take, generate and score chunks until the engine closes; finish none after the end of this call.

        Raises:
            WorkerDiedError: it can be loaded again.
            BaseException: it cannot.
        """

    def cancel(self, job: Job) -> None:
        """Stop the chunks of a job, whose `cancelled` is set, at their next step. Never blocks; any thread."""

    def ping(self) -> Future[None]:
        """Return a future that the worker resolves before its next step. Called only while it runs; never blocks."""

    def close(self) -> None:
        """Free everything that `load` made, after the end of `run`, and resolve all pings; may be called again.

        During `load`, in another thread, it may end the loading with an error. `load` is not called afterwards.
        """
