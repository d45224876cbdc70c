"""A worker in another process, on this machine or another, as the front sees it: messages over a connection."""

import contextlib
import itertools
import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakKeyDictionary

from solrl_core.adapter import Adapter
from solrl_proto.problems import ProblemError, ProblemKind

from solrl_rollout.engine.backends import BackendLoader
from solrl_rollout.engine.work import Chunk, HostedModel, Job, LeasedAdapter
from solrl_rollout.engine.workers.encoding import HOSTED, Header, decode_error, decode_scored, encode_chunk
from solrl_rollout.engine.workers.worker import ChunkQueue, WorkerDiedError
from solrl_rollout.settings import RolloutSettings
from solrl_rollout.status.rollout_metrics import RolloutMetrics

logger = logging.getLogger(__name__)

Source = TypeVar("Source")

END_SECONDS = 15.0
"""Most seconds until a process ends once its connection is closed."""
_SILENT = 2.0
"""Longest silence of a process, in units of `live_timeout`; liveness fails before."""
_LOOKS = 10
"""Parts of that time. If this process itself was stopped for a while, that counts as one of them."""
_LOCAL = {"gpus": None, "workers": 1, "queue_limit": 2**20, "tenant_queue_limit": None}
"""Settings of the engine in a worker's process, whatever the environment says."""


class Connection(Protocol):
    """A process that hosts a worker, and the messages to and from it."""

    def publish(self, adapter: LeasedAdapter) -> Any:
        """Write an adapter's file where the process can read it, once; returns its source for `send`.

        Raises:
            OSError: this machine has no room for it. The process has not ended.
        """

    def send(self, header: Header, source: Any = None) -> None:
        """Send a message, and the source of the adapter that it needs; only one thread calls this.

        Raises:
            OSError: the process has ended, if that is known, or does not understand what follows.
        """

    def receive(self) -> tuple[Header, bytes]:
        """Receive the next message; only one thread calls this.

        Raises:
            ConnectionError: the process has ended.
        """

    def kill(self) -> None:
        """End the connection, and the process by force; any thread may call this, also afterwards again."""

    def close(self) -> str:
        """End the process; returns how it ended, in words. `receive` returns what has arrived, then raises."""


class SharedAdapters(Generic[Source]):
    """Sources that workers read adapters from: each written once, and freed when nothing refers to its adapter."""

    def __init__(self, write: Callable[[bytes], Source]) -> None:
        """`write` makes the source of an adapter's file, which is freed when nothing refers to it."""
        self._sources: WeakKeyDictionary[Adapter, Source] = WeakKeyDictionary()
        self._write = write
        self._writing = threading.Lock()

    def source(self, adapter: LeasedAdapter) -> Source:
        """The source of an adapter, its stored bytes; valid as long as the caller refers to the adapter.

        Raises:
            OSError: no descriptor or no memory is left.
        """
        with self._writing:
            if adapter.adapter not in self._sources:
                self._sources[adapter.adapter] = self._write(adapter.file)
            return self._sources[adapter.adapter]


class RemoteWorker:
    """Starts a process for each `load`, and sends it the next chunk once it has taken the last one."""

    def __init__(
        self,
        settings: RolloutSettings,
        metrics: RolloutMetrics,
        load_backend: BackendLoader,
        *,
        name: str,
        connect: Callable[[], Connection],
    ) -> None:
        """`settings` name its device as it is numbered in the process; `name` is for logs and metrics.

        Raises:
            ValueError: the loader cannot be imported by another process.
        """
        self.name = name
        self._settings = settings
        self._metrics = metrics
        self._loader = importable(load_backend)
        self._connect = connect
        self._lock = threading.Lock()
        self._queue: ChunkQueue | None = None
        self._connection: Connection
        self._running = False
        self._closed = False
        self._ids = itertools.count()
        self._begin()

    def load(self) -> list[HostedModel]:
        self._stop()
        self._begin()
        connection = self._connection = self._connect()
        self._receiver = threading.Thread(target=self._receive, name=f"solrl-receiver-{self.name}")
        self._receiver.start()
        with self._lock:
            self._running, closed = True, self._closed  # from now on, `close` ends the loading
        chosen = self._settings.model_dump(mode="json", exclude={"redis_url", "redis_url_file"}) | _LOCAL
        try:
            if closed:
                raise ConnectionError("the worker was closed before its process ran")
            # The workers of this front on one host read their weights one after another.
            lock = f"solrl-reads-for-{socket.gethostname()}-{os.getpid()}"
            with contextlib.suppress(OSError):  # the receiver notices, too
                connection.send(
                    {"do": "load", "settings": chosen, "loader": self._loader, "name": self.name, "lock": lock}
                )
            return self._loaded.result()
        except BaseException as error:
            how = self._stop()
            if isinstance(error, ConnectionError):
                raise RuntimeError(f"worker {self.name} ended while it loaded: {how}") from error
            raise

    def run(self, queue: ChunkQueue) -> None:
        """Send chunks to the process until the engine closes; returns when the process has answered all, and ended.

        Raises:
            WorkerDiedError: the process has ended.
        """
        self._queue, ended = queue, threading.Event()
        watcher = threading.Thread(target=self._watch, args=(ended,), name=f"solrl-watcher-{self.name}")
        watcher.start()
        try:
            while True:
                queue.wait(self._has_room, self._on_wake)
                chunk = queue.wait_for_chunk(self._on_wake)
                if chunk is None:
                    break
                if chunk.losses:
                    # Alone, so that if it kills this worker, too, no other chunk is lost a second time.
                    queue.wait(self._is_idle, self._on_wake)
                self._send(queue, chunk)
            queue.wait(self._is_idle, self._on_wake)
        except OSError as error:
            how = self._stop()  # results that arrived before the end count
            raise WorkerDiedError(how, list(self._sent.values())) from error
        finally:
            self._stop()  # no result arrives after this: the engine resolves the chunks that are left
            ended.set()
            watcher.join()

    def cancel(self, job: Job) -> None:
        """Stop the job's chunks in the process; the worker's own thread sends the message."""
        with self._lock:
            ids = [id for id, chunk in self._sent.items() if chunk.job is job]
        if ids:
            self._post({"do": "cancel", "ids": ids})

    def ping(self) -> Future[None]:
        """Return a future that the process resolves before its next step, or its death does."""
        ping: Future[None] = Future()
        with self._lock:
            if self._gone:
                ping.set_result(None)
            else:
                self._pings.append(ping)
        self._post({"do": "ping"})
        return ping

    def kill(self) -> None:
        with self._lock:
            running = self._running
        if running:
            self._connection.kill()

    def close(self) -> None:
        """End the process, also one that is about to start."""
        with self._lock:
            self._closed = True
        self._stop()

    def _begin(self) -> None:
        self._loaded: Future[list[HostedModel]] = Future()
        self._sent: dict[int, Chunk] = {}
        self._ahead = False
        """Whether a sent chunk waits in the process until it has generated another."""
        self._pings: deque[Future[None]] = deque()
        self._outbox: deque[Header] = deque()
        self._gone = False

    def _watch(self, ended: threading.Event) -> None:
        """Main function of the thread that ends a silent process, such as one that is stuck in a driver."""
        silent = _SILENT * self._settings.live_timeout
        while not ended.wait(silent / _LOOKS):
            ping = self.ping()
            if not any(wait([ping], silent / _LOOKS).done for _ in range(_LOOKS)):
                logger.error(
                    "worker %s took no step for %g seconds, twice live_timeout, and is replaced; raise live_timeout if "
                    "its steps take longer",
                    self.name,
                    silent,
                )
                self._connection.kill()
                return

    def _is_idle(self) -> bool:
        return not self._sent

    def _has_room(self) -> bool:
        with self._lock:
            alone = any(chunk.losses for chunk in self._sent.values())
            return not (alone or self._ahead)

    def _on_wake(self) -> None:
        """Send what other threads have posted. Raises ConnectionError if the process has ended."""
        if self._gone:
            raise ConnectionError("the process has ended")
        while self._outbox:
            self._connection.send(self._outbox.popleft())

    def _post(self, header: Header) -> None:
        """Have the worker's own thread send a message; this never blocks."""
        self._outbox.append(header)
        if self._queue is not None:
            self._queue.wake()

    def _send(self, queue: ChunkQueue, chunk: Chunk) -> None:
        """Send a chunk. A chunk that cannot be sent counts as not begun. A chunk whose adapter has no room fails."""
        adapter, id = chunk.job.adapter, next(self._ids)
        try:
            source = self._connection.publish(adapter) if adapter else None  # type: ignore[arg-type]  # leased
        except OSError as error:
            logger.error("an adapter of run %r of %r cannot be shared: %s", chunk.job.run, chunk.tenant, error)
            queue.fail(chunk, _no_room(error.strerror or str(error)))
            return
        header = encode_chunk(chunk)
        with self._lock:
            self._sent[id] = chunk
            self._ahead = True
        try:
            self._connection.send({"do": "chunk", "id": id, "chunk": header}, source)
        except OSError:
            with self._lock:
                del self._sent[id]
            raise
        if chunk.job.cancelled.is_set():
            self._connection.send({"do": "cancel", "ids": [id]})

    def _receive(self) -> None:
        error: BaseException = ConnectionError("the process has ended")
        try:
            while True:
                self._handle(*self._connection.receive())
        except OSError:
            pass
        except BaseException as fault:
            logger.exception("worker %s sent what cannot be read", self.name)
            error = fault
        with self._lock:
            self._gone = True
        while self._pings:
            self._answer_ping()  # a worker that died is not stalled
        if not self._loaded.done():
            self._loaded.set_exception(error)
        if self._queue is not None:
            self._queue.wake()

    def _handle(self, header: Header, body: bytes) -> None:
        match header["is"]:
            case "loaded":
                self._note(header)
                self._loaded.set_result(HOSTED.validate_python(header["hosted"]))
            case "unloadable":
                kinds: dict[str, type[Exception]] = {"ValueError": ValueError, "OSError": OSError}
                self._loaded.set_exception(kinds.get(header["error"], RuntimeError)(header["text"]))
            case "taken":
                with self._lock:
                    self._ahead = False
                if self._queue is not None:
                    self._queue.wake()
            case "finished" | "failed":
                self._resolve(header, body)
            case "pong":
                self._answer_ping()
            case "out_of_memory":
                self._metrics.out_of_memory(header["model"], header["part"])
            case "reward_failed":
                self._metrics.reward_failed(header["reward"])
            case kind:
                raise ValueError(f"got the message {kind!r}; expected one of a worker's process")

    def _resolve(self, header: Header, body: bytes) -> None:
        self._note(header)
        queue, chunk = self._queue, self._sent[header["id"]]
        assert queue is not None
        if header["is"] == "finished":
            queue.finish(chunk, decode_scored(header["scored"], body))
        else:
            queue.fail(chunk, decode_error(header["problem"], header["retry_after"]))
        with self._lock:
            del self._sent[header["id"]]
        queue.wake()

    def _answer_ping(self) -> None:
        ping = self._pings.popleft()
        if ping.set_running_or_notify_cancel():
            ping.set_result(None)

    def _note(self, header: Header) -> None:
        self._metrics.worker_memory(self.name, header["memory"])

    def _stop(self) -> str:
        """End the process, if it runs; returns how it ended."""
        with self._lock:
            running, self._running = self._running, False
        if not running:
            return "it was not running"
        how = self._connection.close()
        self._receiver.join()
        return how


def importable(load_backend: BackendLoader) -> str:
    """The `module:name` that another process imports a loader by.

    Raises:
        ValueError: the loader has no such name.
    """
    module, name = (getattr(load_backend, attribute, "") for attribute in ("__module__", "__qualname__"))
    if not module or module == "__main__" or not name.isidentifier():
        raise ValueError(
            f"got the backend loader {load_backend!r} for several workers; expected a function or class at the top "
            "level of a module, which other processes can import"
        )
    return f"{module}:{name}"


def _no_room(fault: str) -> ProblemError:
    return ProblemError(
        ProblemKind.TOO_MANY_BYTES,
        f"the adapter cannot be passed to a worker: {fault}",
        retry_after=5,
        where="body.adapter",
        expected="memory and an open file for each adapter of an unfinished request",
        action="send the same request again later; the service needs more memory or a higher limit of open files",
    )
