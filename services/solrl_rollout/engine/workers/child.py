"""A worker process: `python -m solrl_rollout.engine.workers.child FD` serves the front at the other end of a socket.

It runs one worker, which takes the front's chunks in their order. It ends when the front closes the socket, also by
dying.
"""

import contextlib
import importlib
import logging
import os
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from solrl_core.adapter import Adapter
from solrl_engine.backend import VersionedAdapter
from solrl_http import logs

from solrl_rollout.engine.errors import EngineError
from solrl_rollout.engine.work import Chunk, HostedModel, ScoredChunk
from solrl_rollout.engine.workers.base import WaitingFeed
from solrl_rollout.engine.workers.encoding import Header, decode_chunk, encode_error, encode_hosted, encode_scored
from solrl_rollout.engine.workers.local import LocalWorker
from solrl_rollout.engine.workers.messages import Messages
from solrl_rollout.engine.workers.shared_adapters import MappedAdapters
from solrl_rollout.settings import Settings
from solrl_rollout.status.metrics import Metrics, gpu_memory

logger = logging.getLogger(__name__)

Send = Callable[..., None]
"""Sends the front a header, and a body if there is one; OSError if the front has gone."""

_LAST_SECONDS = 10.0
"""Seconds in which a process whose front has gone stops its work."""


class ForwardedMetrics(Metrics):
    """Sends the front what only the worker knows."""

    def __init__(self, send: Send) -> None:
        super().__init__()
        self._send = send

    def out_of_memory(self, model: str, part: str) -> None:
        """Count a batch that did not fit into memory."""
        self._send({"is": "out_of_memory", "model": model, "part": part})

    def reward_failed(self, reward: str) -> None:
        """Count a chunk on which a reward failed."""
        self._send({"is": "reward_failed", "reward": reward})


class FrontFeed(WaitingFeed):
    """The front's chunks, as the worker in this process sees them: in the order in which they arrived."""

    def __init__(self) -> None:
        super().__init__(threading.Condition())
        self._waiting: deque[Chunk] = deque()
        self._closing = False

    @property
    def closing(self) -> bool:
        """Whether the front has gone."""
        return self._closing

    def next_chunk(self) -> Chunk | None:
        """The oldest chunk that waits."""
        return self._waiting.popleft() if self._waiting else None

    def put(self, chunk: Chunk) -> None:
        """Add a chunk."""
        with self._changed:
            self._waiting.append(chunk)
            self._changed.notify_all()

    def finish(self, chunk: Chunk, scored: ScoredChunk) -> None:
        """Resolve a chunk with its result."""
        chunk.result.set_result(scored)

    def fail(self, chunk: Chunk, error: EngineError) -> None:
        """Resolve a chunk with an error."""
        chunk.result.set_exception(error)

    def close(self) -> None:
        """Give out no more chunks."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()


class Child:
    """Answers the front's messages, whatever carries them."""

    def __init__(self, send: Send, find_adapter: Callable[[str, Any], Adapter]) -> None:
        """Prepare the worker, which the first message has it load.

        Args:
            send: sends the front a message; any thread may call it.
            find_adapter: returns the adapter with a digest, from what came with a chunk's message; may take a while.
        """
        self._send = send
        self._find_adapter = find_adapter
        self._worker: LocalWorker
        self._feed = FrontFeed()
        self._running: threading.Thread | None = None
        self._hosted: list[HostedModel] = []
        self._chunks: dict[int, Chunk] = {}
        self._finder = ThreadPoolExecutor(1, "solrl-finder")
        # Images are compressed while the next chunk is generated.
        self._sender = ThreadPoolExecutor(1, "solrl-sender")

    def handle(self, header: Header, body: bytes = b"", source: Any = None) -> None:
        """Handle a message; `source` is what it has for `find_adapter`. Returns at once."""
        getattr(self, f"_{header.pop('do')}")(body, source, **header)

    def close(self) -> None:
        """Stop the work."""
        for chunk in list(self._chunks.values()):
            self._stop(chunk)
        self._feed.close()
        if self._running is not None and self._hosted:
            self._running.join()

    def _load(self, body: bytes, source: Any, settings: dict[str, Any], loader: str, name: str) -> None:
        chosen = Settings(**settings)
        logs.install(chosen.log_format, worker=name)
        metrics = ForwardedMetrics(self._send)
        module, _, attribute = loader.partition(":")
        load_backend = getattr(importlib.import_module(module), attribute)
        weights_read = partial(self._send, {"is": "weights_read"})
        self._worker = LocalWorker(chosen, metrics, load_backend, name=name, weights_read=weights_read)
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
            self._send({"is": "loaded", "hosted": [encode_hosted(one) for one in self._hosted], **self._state()})
            self._worker.run(self._feed)
        except BaseException:
            logger.exception("the worker's thread died")
            os._exit(1)
        self._worker.close()

    def _chunk(self, body: bytes, source: Any, id: int, chunk: dict[str, Any]) -> None:
        made = self._chunks[id] = decode_chunk(chunk, body)
        made.on_handover = partial(self._handed_over, id)
        made.result.add_done_callback(partial(self._done, id))
        # In a thread of its own, so that finding an adapter delays no other message.
        self._finder.submit(self._submit, made, chunk["adapter"], source)

    def _submit(self, chunk: Chunk, digest: str | None, source: Any) -> None:
        try:
            if digest is not None:
                chunk.job.adapter = VersionedAdapter(digest, self._find_adapter(digest, source))
            self._feed.put(chunk)
        except BaseException:
            logger.exception("a chunk cannot be submitted")
            os._exit(1)

    def _cancel(self, body: bytes, source: Any, ids: list[int]) -> None:
        for id in ids:
            if (chunk := self._chunks.get(id)) is not None:
                self._stop(chunk)

    def _stop(self, chunk: Chunk) -> None:
        chunk.job.cancelled.set()
        self._worker.cancel(chunk.job)

    def _ping(self, body: bytes, source: Any, id: int) -> None:
        self._worker.ping().add_done_callback(lambda _: self._send({"is": "pong", "id": id}))

    def _handed_over(self, id: int) -> None:
        with contextlib.suppress(OSError):  # the front has gone, which `main` notices, too
            self._send({"is": "handed_over", "id": id})

    def _done(self, id: int, result: Future[ScoredChunk]) -> None:
        self._chunks.pop(id, None)
        self._sender.submit(self._send_result, id, result)

    def _send_result(self, id: int, result: Future[ScoredChunk]) -> None:
        try:
            error = result.exception()
            if isinstance(error, EngineError):
                self._send({"is": "failed", "id": id, **encode_error(error), **self._state()})
            else:
                header, body = encode_scored(result.result())
                self._send({"is": "finished", "id": id, "scored": header, **self._state()}, body)
        except OSError:
            pass  # the front has gone, which `main` notices, too
        except BaseException:
            logger.exception("a result cannot be sent")
            os._exit(1)

    def _state(self) -> dict[str, Any]:
        """The worker's lowered batch limits and its GPU's memory."""
        limits = {hosted.info.name: hosted.batch_limits() for hosted in self._hosted}
        return {"limits": limits, "memory": {kind: size for _, kind, size in gpu_memory()}}


def main() -> None:
    """Entry point of the process."""
    # The front decides when to end: a signal to the whole group must not interrupt work that it still drains.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    messages = Messages(socket.socket(fileno=int(sys.argv[1])))
    child = Child(messages.send, MappedAdapters().map)
    try:
        while True:
            child.handle(*messages.receive())
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
