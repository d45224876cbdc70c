"""A worker process: `python -m solrl_rollout.engine.workers.child FD` serves the front at the other end of a socket.

It runs an engine of its own with one worker in this process. It ends when the front closes the socket, also by dying.
"""

import importlib
import logging
import os
import signal
import socket
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from solrl_rollout.engine.engine import Engine
from solrl_rollout.engine.problems import engine_dead
from solrl_rollout.engine.work import Chunk, HostedModel, ScoredChunk, VersionedAdapter
from solrl_rollout.engine.workers.encoding import decode_chunk, encode_error, encode_hosted, encode_scored
from solrl_rollout.engine.workers.local import LocalWorker
from solrl_rollout.engine.workers.messages import Message, Messages
from solrl_rollout.engine.workers.shared_adapters import MappedAdapters
from solrl_rollout.settings import Settings
from solrl_rollout.status import logs
from solrl_rollout.status.metrics import Metrics, gpu_memory

logger = logging.getLogger(__name__)

_LAST_SECONDS = 10.0
"""Seconds in which a process whose front has gone stops its work."""


class ForwardedMetrics(Metrics):
    """Sends the front what only the worker knows."""

    def __init__(self, messages: Messages) -> None:
        super().__init__()
        self._messages = messages

    def out_of_memory(self, model: str, part: str) -> None:
        """Count a batch that did not fit into memory."""
        self._messages.send({"is": "out_of_memory", "model": model, "part": part})

    def reward_failed(self, reward: str) -> None:
        """Count a chunk on which a reward failed."""
        self._messages.send({"is": "reward_failed", "reward": reward})


class Child:
    """Answers the front's messages."""

    def __init__(self, messages: Messages) -> None:
        self._messages = messages
        self._engine: Engine
        self._hosted: list[HostedModel] = []
        self._chunks: dict[int, Chunk] = {}
        self._adapters = MappedAdapters()
        # Images are compressed while the next chunk is generated.
        self._sender = ThreadPoolExecutor(1, "solrl-sender")

    def run(self) -> None:
        """Serve until the front closes the connection."""
        try:
            while True:
                message = self._messages.receive()
                getattr(self, f"_{message.header.pop('do')}")(message, **message.header)
        except ConnectionError:
            pass

    def close(self) -> None:
        """Stop the work."""
        if self._hosted:
            self._engine.close()

    def _load(self, message: Message, settings: dict[str, Any], loader: str, name: str) -> None:
        chosen = Settings(**settings)
        logs.install(chosen.log_format)
        metrics = ForwardedMetrics(self._messages)
        module, _, attribute = loader.partition(":")
        load_backend = getattr(importlib.import_module(module), attribute)
        worker = LocalWorker(chosen, metrics, load_backend, name=name)
        self._engine = Engine(chosen, metrics, [worker])
        self._engine.start().add_done_callback(self._loaded)

    def _loaded(self, loading: Future[list[HostedModel]]) -> None:
        error = loading.exception()
        if error is not None:
            self._messages.send({"is": "unloadable", "error": type(error).__name__, "text": str(error)})
            return
        self._hosted = loading.result()
        self._messages.send({"is": "loaded", "hosted": [encode_hosted(one) for one in self._hosted], **self._state()})

    def _chunk(self, message: Message, id: int, chunk: dict[str, Any]) -> None:
        adapter = None
        if (digest := chunk["adapter"]) is not None:
            assert message.descriptor is not None
            adapter = VersionedAdapter(digest, self._adapters.map(digest, message.descriptor))
        made = self._chunks[id] = decode_chunk(chunk, message.body, adapter)
        made.result.add_done_callback(partial(self._done, id))
        self._engine.submit([made])

    def _cancel(self, message: Message, ids: list[int]) -> None:
        for id in ids:
            if (chunk := self._chunks.get(id)) is not None:
                self._engine.cancel(chunk.job)

    def _ping(self, message: Message, id: int) -> None:
        self._engine.ping().add_done_callback(lambda _: self._messages.send({"is": "pong", "id": id}))

    def _done(self, id: int, result: Future[ScoredChunk]) -> None:
        self._chunks.pop(id, None)
        if self._engine.dead:
            # The front makes the chunk again elsewhere.
            os._exit(1)
        self._sender.submit(self._send, id, result)

    def _send(self, id: int, result: Future[ScoredChunk]) -> None:
        try:
            error = engine_dead() if result.cancelled() else result.exception()
            if error is not None:
                self._messages.send({"is": "failed", "id": id, **encode_error(error), **self._state()})
            else:
                header, body = encode_scored(result.result())
                self._messages.send({"is": "finished", "id": id, "scored": header, **self._state()}, body)
        except OSError:
            pass  # the front has gone, which `run` notices, too
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
    child = Child(Messages(socket.socket(fileno=int(sys.argv[1]))))
    try:
        child.run()
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
