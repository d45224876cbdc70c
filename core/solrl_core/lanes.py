"""Side by side on a CPU: a batch a thread, each single-threaded, is about twice as fast as all threads on one batch.

The tensors here are small, so that sharing each operation among threads costs more than it saves.
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

import torch

Part = TypeVar("Part")
Done = TypeVar("Done")


@cache
def lane_count() -> int:
    """How many lanes this process runs: as many as torch had threads when first asked."""
    return torch.get_num_threads()


@cache
def _pool() -> ThreadPoolExecutor:
    # The number of threads is a setting of the thread that makes it, so the caller's own stays as it is.
    return ThreadPoolExecutor(lane_count(), "solrl-lane", initializer=lambda: torch.set_num_threads(1))


def split(count: int, limit: int, device: torch.device) -> list[slice]:
    """Cut `count` rows into equal slices of at most `limit`; on a CPU at least one for each lane."""
    lanes = lane_count() if device.type == "cpu" else 1
    number = max(math.ceil(count / limit), min(lanes, count))
    size = math.ceil(count / number)
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def side_by_side(work: Callable[[Part], Done], parts: Sequence[Part], device: torch.device) -> list[Done]:
    """Apply `work` to each part, on a CPU in lanes; results in order. The first error is raised once all have ended.

    Grad mode is a thread's own: `work` must set the one it needs.
    """
    # A single part takes a lane as well: on all threads its products would be cut, and so rounded, otherwise.
    if device.type != "cpu" or lane_count() == 1:
        return [work(part) for part in parts]
    futures = [_pool().submit(work, part) for part in parts]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise errors[0]
    return [future.result() for future in futures]
