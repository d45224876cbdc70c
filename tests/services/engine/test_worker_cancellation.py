"""A chunk that waits for an asking thread fails once, however many threads cancel its job."""

import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

from fake_backend import FakeBackend, chunk, job
from solrl_rollout.engine.work import Chunk
from solrl_rollout.engine.workers.local import LocalWorker
from solrl_rollout.settings import Settings
from solrl_rollout.status.metrics import Metrics


def test_a_waiting_chunk_that_two_threads_cancel_fails_once() -> None:
    worker = LocalWorker(Settings(device="cpu"), Metrics(), FakeBackend().load)
    waits, failed = chunk(job()), list[Chunk]()
    worker._feed = SimpleNamespace(fail=lambda one, error: failed.append(one))  # type: ignore[assignment]
    other = threading.Thread(target=worker.cancel, args=(waits.job,))

    class Task(Future[None]):
        """A task that another thread cancels, too, just before it is cancelled."""

        def cancel(self) -> bool:
            if threading.current_thread() is not other:
                other.start()
                other.join(0.1)  # long enough for it, if nothing holds it up
            return super().cancel()

    task: Any = Task()
    worker._asked[waits] = task
    task.add_done_callback(lambda _: worker._asked.pop(waits, None))
    worker.cancel(waits.job)
    other.join()
    assert failed == [waits]
