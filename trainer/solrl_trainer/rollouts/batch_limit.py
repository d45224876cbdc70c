"""Recovery from exhausted device memory: smaller batches, found by halving."""

import gc
from collections.abc import Callable
from typing import TypeVar

import torch
from solrl_core.generator import CHUNK_SIZE

Result = TypeVar("Result")


class BatchLimit:
    """Largest number of candidates in a batch of one generator.

    Attributes:
        size: the limit; it is halved when memory runs out.
    """

    def __init__(self, note: Callable[[str], None] = lambda text: None, *, retries: bool = True) -> None:
        """Set up the largest limit.

        Args:
            note: shows a line of text to the user.
            retries: false for a generator whose weights are sharded: its passes are collectives, and the other ranks
                would not repeat theirs.
        """
        self.size = CHUNK_SIZE
        self._note = note
        self._retries = retries

    def run(self, work: Callable[[int], Result]) -> Result:
        """Call `work` with the limit; on exhausted memory, halve the limit and call it again.

        Raises:
            torch.OutOfMemoryError: not even one candidate fits, or there are no retries.
        """
        while True:
            try:
                return work(self.size)
            except torch.OutOfMemoryError:
                if self.size == 1 or not self._retries:
                    raise
            # Outside `except`, because the error's traceback holds tensors.
            self._note(f"memory ran out with {self.size} candidates in a batch; the limit is now {self.size // 2}")
            self.size //= 2
            gc.collect()
            torch.cuda.empty_cache()  # does nothing if CUDA was never used
