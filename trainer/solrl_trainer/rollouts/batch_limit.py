"""Recovery from exhausted device memory: smaller batches, found by halving."""

import gc
from collections.abc import Callable
from typing import TypeVar

import torch
from solrl_core.generator import CHUNK_SIZE

Result = TypeVar("Result")


class BatchLimit:
    """Largest number of candidates in a batch of one generator, or of images that are scored at once.

    Attributes:
        size: the limit; it is halved when memory runs out.
    """

    def __init__(
        self,
        note: Callable[[str], None] = lambda text: None,
        *,
        size: int = CHUNK_SIZE,
        doing: str = "generating",
        retries: bool = True,
    ) -> None:
        """Set up the largest limit.

        Args:
            size: the limit at the start.
            note: shows a line of text to the user.
            doing: the kind of work in that line.
            retries: false for a generator whose weights are sharded: its passes are collectives, and the other ranks
                would not repeat theirs.
        """
        self.size = size
        self._note = note
        self._doing = doing
        self._retries = retries

    def groups(self, candidates: int, device: torch.device) -> int:
        """Groups of so many candidates that fill a batch. On a CPU, whose batches are small, a group at a time."""
        return max(1, self.size // candidates) if device.type == "cuda" else 1

    def run(self, count: int, work: Callable[[int], Result]) -> Result:
        """Call `work` with the limit; on exhausted memory, halve its batch and call it again.

        Args:
            count: number of candidates; `work` never has more of them in a batch.
            work: called with the largest size of a batch.

        Raises:
            torch.OutOfMemoryError: not even one candidate fits, or there are no retries.
        """
        while True:
            try:
                return work(self.size)
            except torch.OutOfMemoryError:
                batch = min(self.size, count)
                if batch <= 1 or not self._retries:
                    raise
            # Outside `except`, because the error's traceback holds tensors.
            self.size = batch // 2
            self._note(f"memory ran out {self._doing} {batch} images at once; the limit is now {self.size}")
            gc.collect()
            torch.cuda.empty_cache()  # does nothing if CUDA was never used
