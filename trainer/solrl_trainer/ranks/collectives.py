"""Collectives over `torch.distributed`."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from solrl_trainer.ranks.communicator import Communicator
from solrl_trainer.ranks.rank_info import RankInfo

_MARGIN = 1800.0
"""Time limit of a collective, beyond the run's patience: for loading, transfers and unequal work."""
_NOTICE_PAUSE = 0.5
"""Seconds between looks for a notice."""


class DistributedWorld(Communicator):
    """Ranks as processes: gloo for tensors on a CPU, NCCL for tensors on a GPU.

    A barrier of gloo precedes each collective. It notices at once that a process has ended, and names a rank that is
    not there in time.
    """

    def __init__(
        self, rank_info: RankInfo, store: Any, fail: Callable[[Exception], object], *, on_gpu: bool, patience: float
    ) -> None:
        """Initialise torch's process group: a `store` without keys of an earlier one, the run's patience in seconds.

        `fail` ends this process because of an error in another thread.
        """
        self.rank, self.size, self.local_rank = rank_info.rank, rank_info.size, rank_info.local_rank
        self._store = store
        self._fail = fail
        self._closed = threading.Event()
        self._timeout = timedelta(seconds=patience + _MARGIN)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=store,
            rank=rank_info.rank,
            world_size=rank_info.size,
            timeout=self._timeout,
        )
        self._gloo = dist.new_group(backend="gloo", timeout=self._timeout)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.clone(memory_format=torch.contiguous_format)
        self._call(dist.all_reduce, total)
        return total

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        length = torch.tensor([len(tensor)])
        lengths = [torch.zeros_like(length) for _ in range(self.size)]
        self._call(dist.all_gather, lengths, length)
        longest = max(map(int, lengths))
        padded = tensor.new_zeros(longest, *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        self._call(dist.all_gather, parts, padded)
        return [part[: int(count)] for part, count in zip(parts, lengths, strict=True)]

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        sent = tensor.clone(memory_format=torch.contiguous_format)
        self._call(dist.broadcast, sent, 0)
        return sent

    def notify(self, text: str) -> None:
        self._store.set(f"notice/{self._store.add('notices', 1)}", text)

    def on_notice(self, handle: Callable[[str], object]) -> None:
        def serve() -> None:
            number = 1
            try:
                while not self._closed.wait(_NOTICE_PAUSE):
                    while self._store.check([f"notice/{number}"]):
                        handle(self._store.get(f"notice/{number}").decode())
                        number += 1
            except Exception as error:
                self._fail(error)

        threading.Thread(target=serve, name="solrl-notices", daemon=True).start()

    def close(self) -> None:
        """Wait for all ranks, and destroy torch's process group."""
        self._call(lambda: None)
        self._closed.set()
        dist.destroy_process_group()

    def _call(self, collective: Callable[..., Any], *arguments: Any) -> None:
        dist.monitored_barrier(self._gloo, self._timeout)
        collective(*arguments)
