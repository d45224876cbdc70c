"""A worker in a process of its own, as the front sees it."""

import contextlib
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from solrl_rollout.engine.backends.base import BackendLoader
from solrl_rollout.engine.work import Chunk, HostedModel, Job
from solrl_rollout.engine.workers.base import Feed, WorkerDiedError
from solrl_rollout.engine.workers.encoding import decode_error, decode_hosted, decode_scored, encode_chunk
from solrl_rollout.engine.workers.messages import Message, Messages
from solrl_rollout.engine.workers.shared_adapters import AdapterFiles
from solrl_rollout.settings import Settings
from solrl_rollout.status.metrics import Metrics

logger = logging.getLogger(__name__)

_AT_ONCE = 2
"""Chunks that a process has at once: it scores one, or waits for the next, while it generates the other."""
_END_SECONDS = 15.0
"""Seconds in which a process must end once its connection is closed."""
_LOCAL = {"gpus": None, "workers": 1, "queue_limit": 2**20, "tenant_queue_limit": None}
"""Settings of the engine in a worker's process, whatever the environment says."""


class ProcessWorker:
    """Starts a process for each `load`, and gives it up to two chunks at once."""

    def __init__(
        self,
        settings: Settings,
        metrics: Metrics,
        load_backend: BackendLoader,
        *,
        name: str,
        environment: Mapping[str, str],
        files: AdapterFiles,
    ) -> None:
        """Prepare the process.

        Args:
            settings: settings of its models and rewards, with its device as it is numbered there.
            metrics: metrics to update.
            load_backend: an importable function or class.
            name: its name in logs and metrics.
            environment: variables of its environment, in addition to this process's.
            files: adapters in shared memory.

        Raises:
            ValueError: the loader cannot be imported by another process.
        """
        self.name = name
        self._settings = settings
        self._metrics = metrics
        self._loader = importable(load_backend)
        self._environment = environment
        self._files = files
        self._lock = threading.Lock()
        self._feed: Feed | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._limits: dict[str, dict[str, int]] = {}
        self._ids = itertools.count()
        self._begin()

    def load(self) -> list[HostedModel]:
        """Start a process and wait until it has loaded and warmed up all models.

        Raises:
            ValueError, OSError, RuntimeError: a model or a reward cannot be loaded or does not fit.
        """
        self._stop()
        self._begin()
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", "-m", "solrl_rollout.engine.workers.child", str(theirs.fileno())]
            # Modules are found as in this process, e.g. of rewards.
            found = {"PYTHONPATH": os.pathsep.join(sys.path)}
            process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **found, **self._environment},
                stdin=subprocess.DEVNULL,
            )
        self._messages = Messages(ours)
        self._receiver = threading.Thread(target=self._receive, name=f"solrl-receiver-{self.name}")
        self._receiver.start()
        self._process = process  # from now on, `close` ends the loading
        chosen = self._settings.model_dump(mode="json", exclude={"redis_url", "redis_url_file"}) | _LOCAL
        try:
            with contextlib.suppress(OSError):  # the receiver notices, too
                self._messages.send({"do": "load", "settings": chosen, "loader": self._loader, "name": self.name})
            return self._loaded.result()
        except BaseException as error:
            how = self._stop()
            if isinstance(error, ConnectionError):
                raise RuntimeError(f"worker {self.name} ended while it loaded: {how}") from error
            raise

    def run(self, feed: Feed) -> None:
        """Send chunks to the process until the engine closes; returns when the process has answered all.

        Raises:
            WorkerDiedError: the process has ended.
        """
        self._feed = feed
        try:
            while True:
                feed.wait(self._has_room, self._attend)
                chunk = feed.take(self._attend)
                if chunk is None:
                    break
                if chunk.losses:
                    # Alone, so that if it kills this worker, too, no other chunk is lost a second time.
                    feed.wait(self._is_idle, self._attend)
                self._send(chunk)
            feed.wait(self._is_idle, self._attend, _END_SECONDS)
        except OSError as error:
            self._receiver.join()  # results that arrived before the end count
            begun = list(self._sent.values())
            raise WorkerDiedError(self._stop(), begun) from error

    def cancel(self, job: Job) -> None:
        """Tell the process to stop the job's chunks, by the worker's own thread."""
        with self._lock:
            ids = [id for id, chunk in self._sent.items() if chunk.job is job]
        if ids:
            self._post({"do": "cancel", "ids": ids})

    def ping(self) -> Future[None]:
        """Return a future that the process resolves before its next step, or its death does."""
        ping: Future[None] = Future()
        id = next(self._ids)
        with self._lock:
            self._pings[id] = ping
        self._post({"do": "ping", "id": id})
        return ping

    def close(self) -> None:
        """End the process."""
        self._stop()

    def _begin(self) -> None:
        """Reset the state of the connection."""
        self._loaded: Future[list[HostedModel]] = Future()
        self._sent: dict[int, Chunk] = {}
        self._pings: dict[int, Future[None]] = {}
        self._outbox: deque[dict[str, Any]] = deque()
        self._gone = False

    def _is_idle(self) -> bool:
        return not self._sent

    def _has_room(self) -> bool:
        with self._lock:
            return len(self._sent) < (1 if any(chunk.losses for chunk in self._sent.values()) else _AT_ONCE)

    def _attend(self) -> None:
        """Send what other threads have posted. Raises ConnectionError if the process has ended."""
        if self._gone:
            raise ConnectionError("the process has ended")
        while self._outbox:
            self._messages.send(self._outbox.popleft())

    def _post(self, header: dict[str, Any]) -> None:
        """Have the worker's own thread send a message; this never blocks."""
        self._outbox.append(header)
        if self._feed is not None:
            self._feed.wake()

    def _send(self, chunk: Chunk) -> None:
        """Send a chunk. One that cannot be sent was not begun."""
        adapter, id = chunk.job.adapter, next(self._ids)
        header, body = encode_chunk(chunk)
        descriptor = self._files.descriptor(adapter.adapter) if adapter else None
        with self._lock:
            self._sent[id] = chunk
        try:
            self._messages.send({"do": "chunk", "id": id, "chunk": header}, body, descriptor)
        except OSError:
            with self._lock:
                del self._sent[id]
            raise
        if chunk.job.cancelled.is_set():
            self._messages.send({"do": "cancel", "ids": [id]})

    def _receive(self) -> None:
        """Main function of the thread that handles the process's messages until the end of the connection."""
        error: BaseException = ConnectionError("the process has ended")
        try:
            while True:
                message = self._messages.receive()
                getattr(self, f"_on_{message.header.pop('is')}")(message, **message.header)
        except OSError:
            pass
        except BaseException as fault:
            logger.exception("worker %s sent what cannot be read", self.name)
            error = fault
        self._gone = True
        with self._lock:
            pings, self._pings = self._pings, {}
        for ping in pings.values():
            _answer(ping)  # a worker that died is not stalled
        if not self._loaded.done():
            self._loaded.set_exception(error)
        if self._feed is not None:
            self._feed.wake()

    def _on_loaded(self, message: Message, hosted: list[dict[str, Any]], **state: Any) -> None:
        self._note(**state)
        self._loaded.set_result([decode_hosted(one, self._limits) for one in hosted])

    def _on_unloadable(self, message: Message, error: str, text: str) -> None:
        kinds: dict[str, type[Exception]] = {"ValueError": ValueError, "OSError": OSError}
        self._loaded.set_exception(kinds.get(error, RuntimeError)(text))

    def _on_finished(self, message: Message, id: int, scored: dict[str, Any], **state: Any) -> None:
        self._note(**state)
        feed, chunk = self._feed, self._sent[id]
        assert feed is not None
        feed.finish(chunk, decode_scored(scored, message.body, chunk.job.plan))
        self._forget(feed, id)

    def _on_failed(
        self, message: Message, id: int, problem: dict[str, Any], retry_after: int | None, **state: Any
    ) -> None:
        self._note(**state)
        feed = self._feed
        assert feed is not None
        feed.fail(self._sent[id], decode_error({"problem": problem, "retry_after": retry_after}))
        self._forget(feed, id)

    def _on_pong(self, message: Message, id: int) -> None:
        with self._lock:
            ping = self._pings.pop(id)
        _answer(ping)

    def _on_out_of_memory(self, message: Message, model: str, part: str) -> None:
        self._metrics.out_of_memory(model, part)

    def _on_reward_failed(self, message: Message, reward: str) -> None:
        self._metrics.reward_failed(reward)

    def _note(self, limits: dict[str, dict[str, int]], memory: dict[str, int]) -> None:
        self._limits.update(limits)
        self._metrics.worker_memory(self.name, memory)

    def _forget(self, feed: Feed, id: int) -> None:
        with self._lock:
            del self._sent[id]
        feed.wake()

    def _stop(self) -> str:
        """Close the connection and wait for the end of the process; returns how it ended."""
        process, self._process = self._process, None
        if process is None:
            return "it was not running"
        self._messages.close()
        try:
            code = process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        self._receiver.join()
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def importable(load_backend: BackendLoader) -> str:
    """The `module:name` of a loader, by which another process imports it.

    Raises:
        ValueError: it has none.
    """
    module, name = (getattr(load_backend, attribute, "") for attribute in ("__module__", "__qualname__"))
    if not module or module == "__main__" or not name.isidentifier():
        raise ValueError(
            f"got the backend loader {load_backend!r} for several workers; expected a function or class at the top "
            "level of a module, which other processes can import"
        )
    return f"{module}:{name}"


def _answer(ping: Future[None]) -> None:
    if ping.set_running_or_notify_cancel():
        ping.set_result(None)
