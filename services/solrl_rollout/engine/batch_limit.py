"""Recovery from exhausted device memory: smaller batches, found by halving."""

import gc
import logging
from collections.abc import Callable
from typing import TypeVar

import torch
from solrl_core.generator import CHUNK_SIZE

from solrl_rollout.engine.problems import out_of_memory
from solrl_rollout.engine.work import Job
from solrl_rollout.status.metrics import Metrics

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class BatchLimit:
    """Largest batch for one kind of work on a model.

    Attributes:
        size: the limit, halved whenever memory runs out while nothing else runs.
        exclusive: whether other work must end first, because memory once ran out while both ran.
    """

    def __init__(self, model: str, part: str, metrics: Metrics) -> None:
        """`part`: the kind of work in metrics: a precision, or "rewards"."""
        self._model = model
        self._part = part
        self._metrics = metrics
        self.size = CHUNK_SIZE
        self.exclusive = False

    def run(
        self,
        job: Job,
        count: int,
        work: Callable[[slice], Result],
        wait_for_others: Callable[[], bool] = lambda: False,
    ) -> list[Result]:
        """Apply `work` to `count` candidates in slices of at most `size`; if memory runs out, retry once in halves.

        If other work was running, wait for it and retry the same slices before halving them.

        Args:
            job: the job that the candidates belong to.
            count: number of candidates.
            work: called with each slice; its result for a candidate does not depend on the others.
            wait_for_others: waits for other work that uses the memory; returns whether there was any.

        Raises:
            ProblemError: 503 or 507 `out-of-memory`, if the halves do not fit, either.
        """
        if self.exclusive:
            wait_for_others()
        results = self._attempt(count, work)
        if isinstance(results, str) and wait_for_others():
            self.exclusive = True
            self._report(job, min(self.size, count), results, "scoring ends before the next chunk begins")
            free_memory()
            results = self._attempt(count, work)
        if isinstance(results, str):
            self._halve(job, count, results)
            results = self._attempt(count, work)
        if isinstance(results, str):
            batch = min(self.size, count)
            self._halve(job, count, results)
            raise out_of_memory(job.model, job.precision, batch)
        return results

    def _attempt(self, count: int, work: Callable[[slice], Result]) -> list[Result] | str:
        """Return the results, or torch's message if memory ran out."""
        size = min(self.size, count)
        try:
            return [work(slice(start, min(start + size, count))) for start in range(0, count, size)]
        except torch.OutOfMemoryError as error:
            # Not the error itself: its traceback references the tensors that did not fit.
            return str(error)

    def _halve(self, job: Job, count: int, message: str) -> None:
        batch = min(self.size, count)
        self.size = max(1, batch // 2)
        self._report(job, batch, message, f"the batch limit is now {self.size}")
        free_memory()

    def _report(self, job: Job, batch: int, message: str, consequence: str) -> None:
        self._metrics.out_of_memory(self._model, self._part)
        fields = {"model": self._model, "part": self._part, "run": job.run, "tenant": job.tenant, "limit": self.size}
        text = "memory ran out with %d candidates in a batch; %s: %s"
        logger.warning(text, batch, consequence, message, extra={"fields": fields})


def free_memory() -> None:
    """Return unused device memory to the driver."""
    gc.collect()
    torch.cuda.empty_cache()  # does nothing if CUDA was never used
