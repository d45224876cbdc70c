"""The engine: workers that take chunks from one fair queue, each in a thread of its own.

A request that fails by its own fault gets an error. A worker that dies is loaded again, and its chunks are made again.
Once no worker is left, the engine is dead, and the health routes report it.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace

from solrl_proto.problems import ProblemError
from solrl_proto.status import WorkerStatus

from solrl_rollout.engine.errors import ChunkFailedError, EngineDeadError
from solrl_rollout.engine.queue.fair_queue import Quantum
from solrl_rollout.engine.queue.scheduler import BUILTIN_SERVERS, Scheduler
from solrl_rollout.engine.work import Chunk, HostedModel, Job, ScoredChunk
from solrl_rollout.engine.workers.worker import ChunkQueue, Worker, WorkerDiedError
from solrl_rollout.settings import RolloutSettings
from solrl_rollout.status.rollout_metrics import RolloutMetrics

logger = logging.getLogger(__name__)

_MOST_DEATHS = 5
"""Deaths of a worker until it is given up. Deaths count as long as no worker finishes a chunk between them, and the
worker serves for only a short time."""
_STEADY_SECONDS = 300.0
"""Seconds of serving until a worker's earlier deaths no longer count."""
_LONGEST_PAUSE = 30.0
"""Seconds before a worker is loaded again, at most. There is no pause after its first death."""
_KILLED_S = 5.0
"""Most seconds between killing a worker and the end of its thread."""
THREADS = "solrl-engine-"
"""What the names of the workers' threads begin with."""


class WorkerHandle(ChunkQueue):
    """One worker: its state, and its chunks from the fair queue.

    Attributes:
        hosted: the models that it has loaded; empty before.
        serving: whether it is loaded and takes chunks.
        ended: whether it will never serve again.
        deaths: number of times that it died since it last finished a chunk, or served for a long time.
        idle_deaths: the deaths since any worker last finished a chunk.
        restarts: number of times that it serves again after its death.
        chunks: chunks that it has taken and not finished. Guarded by `changed` of the scheduler.
    """

    def __init__(self, worker: Worker, scheduler: Scheduler, *, sticky: bool) -> None:
        """`sticky`: whether it stays with its run beyond a turn while that is fair."""
        super().__init__(scheduler.changed)
        self.worker = worker
        self.hosted: list[HostedModel] = []
        self.serving = False
        self.ended = False
        self.deaths = 0
        self.idle_deaths = 0
        self.restarts = 0
        self.chunks: list[Chunk] = []
        self._scheduler = scheduler
        self._turn = Quantum(sticky=sticky)
        self._finished = 0
        self._finished_by_all = 0
        """Chunks that all workers had finished at this worker's last death."""

    @property
    def status(self) -> WorkerStatus:
        name = self.worker.name
        return WorkerStatus(
            name=name, serving=self.serving, given_up=self.ended, chunks=self._finished, restarts=self.restarts
        )

    @property
    def closing(self) -> bool:
        return self._scheduler.closing

    def next_chunk(self) -> Chunk | None:
        chunk = self._scheduler.next_chunk(self._turn, self.chunks, self._servers)
        if chunk is not None:
            self.chunks.append(chunk)
        return chunk

    def finish(self, chunk: Chunk, scored: ScoredChunk) -> None:
        self._scheduler.record(self.worker.name, chunk, scored)
        with self._scheduler.changed:
            self.chunks.remove(chunk)
            self.deaths = 0
            self._finished += 1
        chunk.result.set_result(scored)

    def fail(self, chunk: Chunk, error: ProblemError) -> None:
        with self._scheduler.changed:
            self.chunks.remove(chunk)
        chunk.result.set_exception(error)

    def died(self) -> None:
        finished = self._scheduler.finished
        if not self.deaths or finished != self._finished_by_all:
            self.idle_deaths = 0
        self._finished_by_all = finished
        self.deaths += 1
        self.idle_deaths += 1

    def put_back(self, begun: Sequence[Chunk]) -> None:
        """Queue all chunks again, after the worker's death; it had begun some of them."""
        with self._scheduler.changed:
            chunks, self.chunks = self.chunks, []
        for chunk in begun:
            chunk.losses += 1
        self._scheduler.put_back(chunks)

    def _servers(self, chunk: Chunk) -> frozenset[str]:
        job = chunk.job
        served = next((model.remote_rewards for model in self.hosted if model.info.name == job.model), frozenset())
        asks_builtin = any(name in served and name not in job.external_rewards for name in job.rewards)
        return job.run_servers | {BUILTIN_SERVERS} if asks_builtin else job.run_servers


class Engine:
    """Owns the workers' threads.

    Attributes:
        scheduler: the queue for the chunks of requests.
    """

    def __init__(self, settings: RolloutSettings, metrics: RolloutMetrics, workers: Sequence[Worker]) -> None:
        """`workers`: at least one, not loaded yet."""
        self._metrics = metrics
        self._live_timeout = settings.live_timeout
        self.scheduler = Scheduler(settings, metrics)
        several = len(workers) > 1
        self._handles = [WorkerHandle(worker, self.scheduler, sticky=several) for worker in workers]
        self._comparing = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._ready: Future[list[HostedModel]] = Future()

    @property
    def workers(self) -> tuple[WorkerStatus, ...]:
        return tuple(handle.status for handle in self._handles)

    def start(self) -> Future[list[HostedModel]]:
        """Load the workers.

        The future resolves with the models once all are warm, or with the error of the first that cannot be loaded.
        """
        self._ready.set_running_or_notify_cancel()  # the caller may stop waiting, but loading continues
        for handle in self._handles:
            name = f"{THREADS}{handle.worker.name}"
            self._threads.append(threading.Thread(target=self._run, args=(handle,), name=name, daemon=True))
        for thread in self._threads:
            thread.start()
        return self._ready

    def cancel(self, job: Job) -> None:
        """Remove a job's waiting chunks and stop its running ones at the next step. Harmless after its end."""
        self.scheduler.cancel(job)
        for handle in self._handles:
            handle.worker.cancel(job)

    def ping(self) -> list[Future[None]]:
        """Return a future for each serving worker, which it resolves before its next step.

        Raises:
            EngineDeadError: no worker will serve again.
        """
        with self.scheduler.changed:
            self.scheduler.require_alive()
            return [handle.worker.ping() for handle in self._handles if handle.serving]

    def waiting(self, tenant: str) -> tuple[list[Chunk], bool]:
        """A tenant's waiting chunks, and whether one of its chunks is running."""
        with self.scheduler.changed:
            running = any(chunk.tenant == tenant for handle in self._handles for chunk in handle.chunks)
            return self.scheduler.waiting(tenant), running

    def close(self) -> None:
        """Cancel unfinished work and end the threads.

        A worker that takes no step for `live_timeout` is killed, or left behind if it is in this process.
        """
        with self.scheduler.changed:
            self.scheduler.closing = True
            jobs = [chunk.job for handle in self._handles for chunk in handle.chunks]
            loading = [handle.worker for handle in self._handles if not (handle.serving or handle.ended)]
            self.scheduler.changed.notify_all()
        for worker in loading:
            worker.close()
        for job in jobs:
            self.cancel(job)
        for handle in self._left_after(self._live_timeout):
            rewards = sorted({name for chunk in handle.chunks for name in chunk.job.rewards})
            logger.error(
                "worker %s does not end within live_timeout, %g s, and is left behind; its chunks have the rewards %s, "
                "and perhaps one of these does not return",
                *(handle.worker.name, self._live_timeout, ", ".join(rewards) or "none"),
            )
            handle.worker.kill()
        self._left_after(_KILLED_S)

    def _left_after(self, seconds: float) -> list[WorkerHandle]:
        """Wait `seconds` for the end of the threads; returns the workers whose threads still run."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return [handle for handle, thread in zip(self._handles, self._threads, strict=False) if thread.is_alive()]

    def _run(self, handle: WorkerHandle) -> None:
        try:
            all_loaded = self._load(handle)
        except BaseException as error:
            with self.scheduler.changed:
                self.scheduler.closing = True
                self.scheduler.changed.notify_all()
            self._end(handle, error)
            with self._comparing:
                if not self._ready.done():  # another worker may have failed, too
                    self._ready.set_exception(error)
            return
        self._set_serving(handle, True)
        if all_loaded and self.scheduler.closing:
            self._ready.set_exception(EngineDeadError())
        elif all_loaded:
            self._ready.set_result(describe({peer.worker.name: peer.hosted for peer in self._handles}))
        self._end(handle, self._supervise(handle))

    def _load(self, handle: WorkerHandle) -> bool:
        """Load a worker, whose models must equal the other workers' models; returns whether it is the last one.

        Raises:
            ValueError, OSError, RuntimeError: it cannot be loaded, or its models differ.
        """
        hosted = handle.worker.load()
        with self._comparing:
            loaded = next((peer for peer in self._handles if peer.hosted), None)
            if loaded is not None:
                require_equal_models(handle.worker.name, hosted, loaded.worker.name, loaded.hosted)
            handle.hosted = hosted
            return all(peer.hosted for peer in self._handles)

    def _supervise(self, handle: WorkerHandle) -> BaseException | None:
        """Run a worker until the engine closes, again after each death; returns the error that ended it for good."""
        while True:
            began = time.monotonic()
            try:
                handle.worker.run(handle)
            except WorkerDiedError as died:
                logger.error("worker %s died: %s", handle.worker.name, died)
                self._set_serving(handle, False)
                handle.put_back(died.chunks)
                if time.monotonic() - began > _STEADY_SECONDS:
                    handle.deaths = 0
                if self._revive(handle):
                    continue
            except BaseException as error:
                logger.exception("the engine thread died; with the last one, health routes answer 503 from now on")
                return error
            return None

    def _revive(self, handle: WorkerHandle) -> bool:
        """Load a worker again, if need be several times; returns whether it serves."""
        name = handle.worker.name
        while True:
            handle.died()
            if handle.idle_deaths >= _MOST_DEATHS:
                break
            pause = min(2.0 ** min(handle.deaths - 2, 9), _LONGEST_PAUSE) if handle.deaths > 1 else 0.0
            logger.warning(
                "worker %s is loaded again in %g seconds; of %d deaths after which it is given up, it has %d",
                *(name, pause, _MOST_DEATHS, handle.idle_deaths),
            )
            with self.scheduler.changed:
                if self.scheduler.changed.wait_for(lambda: self.scheduler.closing, pause):
                    return False
            try:
                self._load(handle)
            except Exception:
                logger.exception("worker %s cannot be loaded again", name)
                continue
            handle.restarts += 1
            self._metrics.worker_restarted(name)
            logger.warning("worker %s serves again", name)
            self._set_serving(handle, True)
            return True
        logger.error(
            "worker %s is given up: it died %d times, and no worker finished a chunk in between; restart the service "
            "once the cause is mended",
            *(name, _MOST_DEATHS),
        )
        return False

    def _set_serving(self, handle: WorkerHandle, serving: bool) -> None:
        with self.scheduler.changed:
            handle.serving = serving
            self.scheduler.serving = sum(peer.serving for peer in self._handles)
        self._metrics.worker_up(handle.worker.name, serving)

    def _end(self, handle: WorkerHandle, error: BaseException | None) -> None:
        """End a worker for good: the other workers make its chunks. After the last worker, all chunks get an error."""
        self._set_serving(handle, False)
        with self.scheduler.changed:
            handle.ended = True
            if all(peer.ended for peer in self._handles):
                self.scheduler.dead = True
            unfinished, handle.chunks = handle.chunks, []
        if not self.scheduler.dead:
            self.scheduler.put_back(unfinished)
        else:
            for chunk in unfinished:
                chunk.result.set_exception(ChunkFailedError() if isinstance(error, Exception) else EngineDeadError())
            for chunk in self.scheduler.clear():
                if chunk.result.running() or chunk.result.set_running_or_notify_cancel():
                    chunk.result.set_exception(EngineDeadError())
        handle.worker.close()


def require_equal_models(name: str, hosted: Sequence[HostedModel], first: str, expected: Sequence[HostedModel]) -> None:
    """Check that a worker's models equal the first worker's models.

    Raises:
        RuntimeError: names what differs.
    """
    for ours, theirs in zip(hosted, expected, strict=True):
        info, reference = (
            model.info.model_dump(mode="json", exclude={"digests"}) | model.info.digests for model in (ours, theirs)
        )
        differing = [part for part in info | reference if info.get(part) != reference.get(part)]
        if differing:
            texts = [f"{part}: {info.get(part)} ({first}: {reference.get(part)})" for part in differing]
            raise RuntimeError(
                f"worker {name} and worker {first} loaded {ours.info.name} differently, in {'; '.join(texts)}; all "
                "workers must have equal weights, rewards and precisions: pin the model's revision, and use equal GPUs"
            )


def describe(workers: Mapping[str, Sequence[HostedModel]]) -> list[HostedModel]:
    """The models of workers, by their names, as the rest of the service sees them."""
    device = ", ".join(workers)
    return [
        models[0] if len(models) == 1 else replace(models[0], device=device)
        for models in zip(*workers.values(), strict=True)
    ]
