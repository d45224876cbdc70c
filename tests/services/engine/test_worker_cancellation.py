"""A chunk that waits for a reward server fails once, however many threads cancel its job."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

from fake_backend import FakeBackend, chunk, job
from solrl_client import background
from solrl_rollout.engine.work import Chunk
from solrl_rollout.engine.workers.local import LocalWorker
from solrl_rollout.settings import RolloutSettings
from solrl_rollout.status.rollout_metrics import RolloutMetrics


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
