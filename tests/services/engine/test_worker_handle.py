"""The engine's side of a worker: chunks that several threads finish are accounted for one after the other."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

from fake_backend import FakeBackend, chunk, job
from solrl_client import background
from solrl_rollout.engine.queue.worker_handle import WorkerHandle
from solrl_rollout.engine.work import Chunk, ScoredChunk
from solrl_rollout.engine.workers.local import LocalWorker
from solrl_rollout.settings import RolloutSettings
from solrl_rollout.status.rollout_metrics import RolloutMetrics


class Accounts:
    """A dispatch that keeps each `last_end`; during its first account, another thread finishes the next chunk."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.last_ends: list[float] = []
        self.next: threading.Thread

    def record(self, worker: str, finished: Any, scored: Any, last_end: float) -> float:
        self.last_ends.append(last_end)
        if len(self.last_ends) == 1:
            self.next.start()
            self.next.join(0.1)  # long enough for it, if nothing held it up
        return last_end + 1


def test_chunks_that_threads_finish_together_are_accounted_for_in_turn() -> None:
    accounts, worker = Accounts(), SimpleNamespace(name="w")
    handle = WorkerHandle(worker, accounts, keeps_run=False)  # type: ignore[arg-type]
    scored = ScoredChunk({}, None, None, 0, 0.0, False, 0.0, 1.0, 0.0)
    handle.chunks = [chunk(job()), chunk(job())]
    first, second = handle.chunks
    accounts.next = threading.Thread(target=handle.finish, args=(second, scored))
    handle.finish(first, scored)
    accounts.next.join()
    assert accounts.last_ends == [0.0, 1.0], "the second chunk begins where the first ended"
    assert handle.status.chunks == 2


def test_a_waiting_chunk_that_several_threads_cancel_fails_once() -> None:
    worker = LocalWorker(RolloutSettings(device="cpu"), RolloutMetrics(), FakeBackend().load)
    waits, failed, asked = chunk(job()), list[Chunk](), threading.Event()
    worker._queue = SimpleNamespace(fail=lambda one, error: failed.append(one))  # type: ignore[assignment]

    async def ask_servers(*_: Any) -> None:
        asked.set()
        await asyncio.Event().wait()

    scorer: Any = SimpleNamespace(ask_servers=ask_servers)
    task = background.start(worker._ask_servers(scorer, waits, None))  # type: ignore[arg-type]
    assert asked.wait(600)
    threads = [threading.Thread(target=worker.cancel, args=(waits.job,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    task.result(600)
    for thread in threads:
        thread.join()
    assert failed == [waits]
