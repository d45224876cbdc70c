"""Collectives over `torch.distributed`."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from solrl_trainer.ranks.liveness import Liveness
from solrl_trainer.ranks.rank_info import RankInfo

_TRANSFER_TIMEOUT = 600.0
"""Time limit of a collective, beyond the run's patience. Ranks begin it together, so only its transfer takes time."""


class DistributedWorld:
    """Ranks as processes: gloo for tensors on a CPU, NCCL for those on a GPU.

    A barrier without a time limit precedes each collective. So the ranks wait for a slow one outside the collective.
    """

    def __init__(self, rank_info: RankInfo, liveness: Liveness, store: Any, *, on_gpu: bool, patience: float) -> None:
        """Initialise torch's process group.

        Args:
            rank_info: rank of this process.
            liveness: barriers of the ranks.
            store: store of the ranks, without keys of an earlier process group.
            on_gpu: whether the run's device is a GPU.
            patience: the run's patience in seconds.
        """
        self.rank, self.size, self.local_rank = rank_info.rank, rank_info.size, rank_info.local_rank
        self._liveness = liveness
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=store,
            rank=rank_info.rank,
            world_size=rank_info.size,
            timeout=timedelta(seconds=patience + _TRANSFER_TIMEOUT),
        )

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum of all ranks' tensors, bit-equal on every rank."""
        total = tensor.clone(memory_format=torch.contiguous_format)
        self._call(dist.all_reduce, total)
        return total

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """All ranks' tensors in the order of ranks, on every rank; their first axes may differ in length."""
        length = torch.tensor([len(tensor)])
        lengths = [torch.zeros_like(length) for _ in range(self.size)]
        self._call(dist.all_gather, lengths, length)
        longest = max(int(one) for one in lengths)
        padded = tensor.new_zeros(longest, *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        self._call(dist.all_gather, parts, padded)
        return [part[: int(one)] for part, one in zip(parts, lengths, strict=True)]

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rank 0's tensor, on every rank; `tensor` has its shape. No rank returns before rank 0 has called it."""
        sent = tensor.clone(memory_format=torch.contiguous_format)
        self._call(dist.broadcast, sent, 0)
        return sent

    def notify(self, text: str) -> None:
        """Send a text to rank 0, without waiting."""
        self._liveness.notify(text)

    def on_notice(self, handle: Callable[[str], object]) -> None:
        """On rank 0: call `handle` with the text of each notice, in another thread. Its error shuts all ranks down."""
        self._liveness.on_notice(handle)

    def close(self) -> None:
        """Destroy torch's process group."""
        dist.destroy_process_group()

    def _call(self, collective: Callable[..., Any], *arguments: Any) -> None:
        self._liveness.barrier()
        collective(*arguments)
