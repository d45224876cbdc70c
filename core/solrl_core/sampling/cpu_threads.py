"""Parallel threads of a CPU, each with a batch of its own.

The tensors here are small. Sharing each operation among all threads costs more than it saves, and one batch per thread
is about twice as fast.
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


@cache
def thread_count() -> int:
    """Number of threads of this process: torch's number of threads at the first call."""
    return torch.get_num_threads()


@cache
def _pool() -> ThreadPoolExecutor:
    # torch's number of threads is a setting of each thread, so the caller keeps its own.
    return ThreadPoolExecutor(thread_count(), "solrl-batch", initializer=lambda: torch.set_num_threads(1))


def even_slices(count: int, limit: int, device: torch.device, fewest: int = 1) -> list[slice]:
    """Cut `count` rows into equal slices of at most `limit`; on a CPU one a thread, if each then has `fewest` rows."""
    threads = thread_count() if device.type == "cpu" else 1
    number = max(math.ceil(count / limit), min(threads, math.ceil(count / fewest)))
    size = math.ceil(count / number)
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def map_in_threads(work: Callable[[Item], Result], items: Sequence[Item], device: torch.device) -> list[Result]:
    """Apply `work` to each item, on a CPU in threads; results in order. The first error is raised once all have ended.

    Grad mode belongs to a thread: `work` must set the one it needs.
    """
    # A single item also runs in one thread: on several its products would be split, and so rounded, differently.
    if device.type != "cpu" or thread_count() == torch.get_num_threads() == 1:
        return [work(item) for item in items]
    futures = [_pool().submit(work, item) for item in items]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise errors[0]
    return [future.result() for future in futures]
