"""A worker process: `python -m solrl_rollout.engine.workers.child FD` serves the front at the other end of a socket.

It runs one worker. Each time that this takes a chunk, the front sends the next, so that one waits while another is
generated. The process ends when the front closes the socket, also by dying.
"""

import contextlib
import importlib
import logging
import mmap
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from solrl_core.adapter import Adapter, view_adapter
from solrl_engine.backend import VersionedAdapter
from solrl_http import logs
from solrl_proto.problems import ProblemError

from solrl_rollout.engine.work import Chunk, HostedModel, ScoredChunk
from solrl_rollout.engine.workers.encoding import HOSTED, Header, decode_chunk, encode_error, encode_scored
from solrl_rollout.engine.workers.local import LocalWorker
from solrl_rollout.engine.workers.process import Messages
from solrl_rollout.engine.workers.worker import ChunkQueue
from solrl_rollout.settings import RolloutSettings
from solrl_rollout.status.rollout_metrics import RolloutMetrics, gpu_memory

logger = logging.getLogger(__name__)

Send = Callable[..., None]
"""Sends the front a header, and a body if there is one; OSError if the front has gone."""

_LAST_SECONDS = 10.0
"""Most seconds until a process stops its work once its front has gone."""
_NEWEST = 4
"""Adapters that a worker keeps; at once, it generates, scores and awaits chunks of at most three."""


class ForwardedMetrics(RolloutMetrics):
    """Sends the front what only the worker knows."""

    def __init__(self, send: Send) -> None:
        super().__init__()
        self._send = send

    def out_of_memory(self, model: str, part: str) -> None:
        self._send({"is": "out_of_memory", "model": model, "part": part})

    def reward_failed(self, reward: str) -> None:
        self._send({"is": "reward_failed", "reward": reward})


class Child(ChunkQueue):
    """A worker behind a connection: gives it the front's chunks, and sends the front its results."""

    def __init__(self, send: Send, read: Callable[[Any], Adapter]) -> None:
        """Prepare the worker, which the first message has it load.

        Args:
            send: sends the front a message; any thread may call it.
            read: reads an adapter from the source that came with a chunk's message; may take a while.
        """
        super().__init__(threading.Condition())
        self._send = send
        self._read = read
        self._adapters: dict[str, Adapter] = {}
        """The adapters used last, by digest. A merge checks each adapter for overflow only once."""
        self._worker: LocalWorker
        self._running: threading.Thread | None = None
        self._hosted: list[HostedModel] = []
        self._ids: dict[Chunk, int] = {}
        """Chunks that are not finished, and the front's ids of them."""
        self._next: Chunk | None = None
        """The chunk that waits while the worker generates another."""
        self._closing = False
        self._finder = ThreadPoolExecutor(1, "solrl-finder")
        # Images are compressed while the next chunk is generated.
        self._sender = ThreadPoolExecutor(1, "solrl-sender")

    def handle(self, header: Header, source: Any = None) -> None:
        """Handle a message; `source` is what its adapter is read from. Returns at once."""
        match header["do"]:
            case "load":
                self._load(header)
            case "chunk":
                chunk = decode_chunk(header["chunk"])
                self._ids[chunk] = header["id"]
                # In a thread of its own, so that finding an adapter delays no other message.
                self._finder.submit(self._put, chunk, header["chunk"]["adapter"], source)
            case "cancel":
                for chunk, id in list(self._ids.items()):
                    if id in header["ids"]:
                        self._stop(chunk)
            case "ping":
                self._worker.ping().add_done_callback(lambda _: self._send({"is": "pong"}))
            case kind:
                raise ValueError(f"got the message {kind!r}; expected one of the front")

    def close(self) -> None:
        for chunk in list(self._ids):
            self._stop(chunk)
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._running is not None and self._hosted:
            self._running.join()

    @property
    def closing(self) -> bool:
        return self._closing

    def next_chunk(self) -> Chunk | None:
        """Take the chunk that waits, and have the front send the next."""
        chunk, self._next = self._next, None
        if chunk is not None:
            with contextlib.suppress(OSError):  # the front has gone, which `main` notices, too
                self._send({"is": "taken"})
        return chunk

    def finish(self, chunk: Chunk, scored: ScoredChunk) -> None:
        self._sender.submit(self._send_result, self._ids.pop(chunk), scored)

    def fail(self, chunk: Chunk, error: ProblemError) -> None:
        self._sender.submit(self._send_result, self._ids.pop(chunk), error)

    def _load(self, header: Header) -> None:
        settings, name = RolloutSettings(**header["settings"]), header["name"]
        logs.install(settings.log_format, worker=name)
        module, _, attribute = header["loader"].partition(":")
        load_backend = getattr(importlib.import_module(module), attribute)
        metrics = ForwardedMetrics(self._send)
        self._worker = LocalWorker(settings, metrics, load_backend, name=name, lock=header["lock"])
        self._running = threading.Thread(target=self._run, name=f"solrl-engine-{name}", daemon=True)
        self._running.start()

    def _run(self) -> None:
        """Load and run the worker. If its thread ends with an error, so does the process: its chunks are lost."""
        try:
            self._hosted = self._worker.load()
        except BaseException as error:
            self._send({"is": "unloadable", "error": type(error).__name__, "text": str(error)})
            return
        try:
            self._send({"is": "loaded", "hosted": HOSTED.dump_python(self._hosted, mode="json"), **self._state()})
            self._worker.run(self)
        except BaseException:
            logger.exception("the worker's thread died")
            os._exit(1)
        self._worker.close()

    def _put(self, chunk: Chunk, digest: str | None, source: Any) -> None:
        try:
            if digest is not None:
                chunk.job.adapter = VersionedAdapter(digest, self.find_adapter(digest, source))
            with self._changed:
                self._next = chunk
                self._changed.notify_all()
        except BaseException:
            logger.exception("a chunk cannot be submitted")
            os._exit(1)

    def find_adapter(self, digest: str, source: Any) -> Adapter:
        """The adapter with a digest, read unless it was used lately. Only one thread calls this."""
        adapter = self._adapters.pop(digest, None) or self._read(source)
        self._adapters[digest] = adapter
        if len(self._adapters) > _NEWEST:
            del self._adapters[next(iter(self._adapters))]
        return adapter

    def _stop(self, chunk: Chunk) -> None:
        chunk.job.cancelled.set()
        self._worker.cancel(chunk.job)

    def _send_result(self, id: int, result: ScoredChunk | ProblemError) -> None:
        try:
            if isinstance(result, ProblemError):
                self._send({"is": "failed", "id": id, **encode_error(result), **self._state()})
            else:
                header, body = encode_scored(result)
                self._send({"is": "finished", "id": id, "scored": header, **self._state()}, body)
        except OSError:
            pass  # the front has gone, which `main` notices, too
        except BaseException:
            logger.exception("a result cannot be sent")
            os._exit(1)

    def _state(self) -> dict[str, Any]:
        """The memory of the worker's GPU."""
        return {"memory": {kind: size for _, kind, size in gpu_memory()}}


def map_adapter(path: str) -> Adapter:
    with open(path, "rb") as file:
        return view_adapter(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))


def main() -> None:
    # The front decides when to end: a signal to the whole group must not interrupt work that it still drains.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    messages = Messages(socket.socket(fileno=int(sys.argv[1])))
    child = Child(messages.send, map_adapter)
    try:
        while True:
            header, _ = messages.receive()
            child.handle(header, header.pop("source", None))
    except ConnectionError:
        pass
    except BaseException:
        logger.exception("the worker ends")
        os._exit(1)
    last = threading.Timer(_LAST_SECONDS, os._exit, (1,))
    last.daemon = True
    last.start()
    child.close()
    os._exit(0)


if __name__ == "__main__":
    main()
