"""A world of processes: collectives over torch.distributed."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from solrl_trainer.ranks.lifeline import Lifeline, ToldToEndError
from solrl_trainer.ranks.place import Place

_LONGEST = 600.0
"""Time limit of a collective, beyond the run's patience. Ranks begin it together, so only its transfer takes time."""


class DistributedWorld:
    """Ranks as processes: gloo for tensors on a CPU, NCCL for those on a GPU.

    Before each collective the ranks meet. So if one waits for a service, the others wait for it outside the collective.
    """

    def __init__(self, place: Place, line: Lifeline, store: Any, *, on_gpu: bool, patience: float) -> None:
        """Join the process group.

        Args:
            place: place of this process.
            line: connections to the other ranks.
            store: rendezvous store of the processes.
            on_gpu: whether the run's device is a GPU.
            patience: the run's patience in seconds.
        """
        self.rank, self.size, self.local_rank = place.rank, place.size, place.local_rank
        self._line = line
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=store,
            rank=place.rank,
            world_size=place.size,
            timeout=timedelta(seconds=patience + _LONGEST),
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

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()

    def _call(self, collective: Callable[..., Any], *arguments: Any) -> None:
        self._line.meet()
        try:
            collective(*arguments)
        except RuntimeError:
            if self._line.await_end() is not None:  # a rank died, which explains more than the collective's error
                raise ToldToEndError from None
            raise
