"""The engine's side of one worker: gives it chunks in its turns and takes their results."""

from collections.abc import Sequence

from solrl_proto.problems import ProblemError
from solrl_proto.status import WorkerStatus

from solrl_rollout.engine.queue.fair_queue import Quantum
from solrl_rollout.engine.queue.scheduler import BUILTIN_SERVERS, Scheduler
from solrl_rollout.engine.work import Chunk, HostedModel, ScoredChunk
from solrl_rollout.engine.workers.worker import ChunkQueue, Worker


class WorkerHandle(ChunkQueue):
    """One worker: its state, and its chunks from the fair queue.

    Attributes:
        worker: the worker.
        hosted: the models that it has loaded; empty before.
        serving: whether it is loaded and takes chunks.
        ended: whether it will never serve again.
        deaths: number of times that it died since it last finished a chunk, or served for a long time.
        idle_deaths: those of them since any worker last finished a chunk.
        restarts: number of times that it serves again after its death.
        chunks: chunks that it has taken and not finished. Guarded by `changed` of the scheduler.
    """

    def __init__(self, worker: Worker, scheduler: Scheduler, *, keeps_run: bool) -> None:
        """`keeps_run`: whether it stays with its run beyond a turn while that is fair."""
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
        self._turn = Quantum(keeps_run=keeps_run)
        self._finished = 0
        self._finished_by_all = 0
        """By all workers, at its last death."""

    @property
    def status(self) -> WorkerStatus:
        """The worker's state."""
        name = self.worker.name
        return WorkerStatus(
            name=name, serving=self.serving, given_up=self.ended, chunks=self._finished, restarts=self.restarts
        )

    @property
    def closing(self) -> bool:
        """Whether the engine closes."""
        return self._scheduler.closing

    def next_chunk(self) -> Chunk | None:
        """Take the worker's next chunk from the queue, if there is one now."""
        chunk = self._scheduler.take(self._turn, self.chunks, self._servers)
        if chunk is not None:
            self.chunks.append(chunk)
        return chunk

    def finish(self, chunk: Chunk, scored: ScoredChunk) -> None:
        """Resolve a chunk with its result."""
        self._scheduler.record(self.worker.name, chunk, scored)
        with self._scheduler.changed:
            self.chunks.remove(chunk)
            self.deaths = 0
            self._finished += 1
        chunk.result.set_result(scored)

    def fail(self, chunk: Chunk, error: ProblemError) -> None:
        """Resolve a chunk with an error."""
        with self._scheduler.changed:
            self.chunks.remove(chunk)
        chunk.result.set_exception(error)

    def died(self) -> None:
        """Count a death."""
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
        """The reward servers that a chunk needs."""
        job = chunk.job
        served = next((one.remote_rewards for one in self.hosted if one.info.name == job.model), frozenset())
        own = any(name in served and name not in job.external_rewards for name in job.rewards)
        return job.run_servers | {BUILTIN_SERVERS} if own else job.run_servers
