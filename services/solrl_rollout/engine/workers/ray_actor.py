"""A worker as a Ray actor, in a process that Ray places and starts.

Its methods take and return bytes, which Ray does not pickle. Errors end the process, so none is pickled either.
"""

import logging
import os
import queue
from typing import Any

import ray
import torch
from solrl_core.adapter import Adapter, view_adapter

from solrl_rollout.engine.workers.child import Child
from solrl_rollout.engine.workers.encoding import Header
from solrl_rollout.engine.workers.messages import decode_message, encode_message
from solrl_rollout.engine.workers.shared_adapters import NewestAdapters

logger = logging.getLogger(__name__)


class WorkerActor:
    """Answers the front's messages. `handle` and `receive` run in two concurrency groups of one thread each.

    Generation runs in a thread of the worker, so that neither call waits for it: a cancelled chunk stops at its next
    step, whereas `ray.cancel` would wait for a method that generates.
    """

    def __init__(self, name: str, threads: int) -> None:
        """`name`: that of the worker in logs; `threads`: of torch."""
        torch.set_num_threads(threads)
        self._name = name
        self._outbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._newest = NewestAdapters()
        self._child = Child(self._send, self._find_adapter)

    def __repr__(self) -> str:
        """Its name in Ray's logs and pages."""
        return self._name

    def place(self) -> tuple[str, int]:
        """The id of its node and that of its process."""
        return ray.get_runtime_context().get_node_id(), os.getpid()

    def handle(self, message: bytes, source: list[Any]) -> None:
        """Handle a message; `source` has the reference to its adapter's file, if it has one."""
        try:
            self._child.handle(*decode_message(message), *source)
        except BaseException:
            logger.exception("the worker ends")
            os._exit(1)

    def receive(self) -> bytes:
        """The next message to the front; waits for one."""
        return self._outbox.get()

    def _send(self, header: Header, body: bytes = b"") -> None:
        self._outbox.put(encode_message(header, body))

    def _find_adapter(self, digest: str, source: Any) -> Adapter:
        # Copied, because tensors need writable memory.
        return self._newest.get(digest, lambda: view_adapter(bytearray(ray.get(source))))
