"""Batch sizes that adapt to the device's memory: halved whenever memory runs out."""

import gc
import logging
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import TypeVar

import torch
from solrl_core.sampling.batches import CHUNK_SIZE

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class DoesNotFitError(torch.OutOfMemoryError):
    """Not even one candidate fits into the device's memory, or not the weights."""


@dataclass(eq=False)
class AdaptiveBatchSize:
    """Largest batch for one kind of work.

    Attributes:
        size: the largest number of candidates, halved whenever memory runs out while nothing else runs.
        doing: the kind of work, in messages.
        on_exhausted: called with a sentence whenever memory ran out.
        retries: false for a generator whose weights are sharded: its passes are collectives, and the other ranks would
            not repeat theirs.
        exclusive: whether other work must end first, because memory once ran out while both ran.
    """

    size: int = CHUNK_SIZE
    _: KW_ONLY
    doing: str = "generating"
    on_exhausted: Callable[[str], None] = logger.warning
    retries: bool = True
    exclusive: bool = field(default=False, init=False)

    def groups(self, candidates: int, device: torch.device) -> int:
        """Number of groups of `candidates` candidates that fill a batch; 1 on a CPU, whose batches are small."""
        return max(1, self.size // candidates) if device.type == "cuda" else 1

    def run(
        self, count: int, work: Callable[[slice], Result], wait_for_others: Callable[[], bool] = lambda: False
    ) -> list[Result]:
        """Apply `work` to `count` candidates in slices of at most `size`, smaller ones whenever memory runs out.

        If other work was running, wait for it and retry the same slices before halving them.

        Args:
            count, work: `work` is called with each slice; its result for a candidate depends on no other candidate.
            wait_for_others: waits for other work that uses the memory; returns whether there was any.

        Raises:
            DoesNotFitError: not even one candidate fits.
            torch.OutOfMemoryError: memory ran out, and there are no retries.
        """
        if self.exclusive:
            wait_for_others()
        while isinstance(results := self._attempt(count, work), str):
            batch = min(self.size, count)
            if wait_for_others():
                self.exclusive = True
                self._report(batch, "scoring ends before the next batch begins", results)
            else:
                self.size = max(1, batch // 2)
                self._report(batch, f"the limit is now {self.size}", results)
                if batch == 1:
                    raise DoesNotFitError(f"the device's memory cannot fit {self.doing} 1 candidate: {results}")
            free_memory()
        return results

    def _attempt(self, count: int, work: Callable[[slice], Result]) -> list[Result] | str:
        """Return the results, or torch's message if memory ran out."""
        size = min(self.size, count)
        try:
            return [work(slice(start, min(start + size, count))) for start in range(0, count, size)]
        except torch.OutOfMemoryError as error:
            if not self.retries:
                raise
            # Not the error itself: its traceback refers to the tensors that did not fit.
            return str(error)

    def _report(self, batch: int, consequence: str, fault: str) -> None:
        self.on_exhausted(f"memory ran out {self.doing} {batch} images at once; {consequence}: {fault}")


def free_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()  # does nothing if CUDA was never used
