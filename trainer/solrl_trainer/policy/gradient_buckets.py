"""The gradient of an optimiser step: a sum over the micro-batches of all ranks."""

from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from solrl_trainer.ranks.communicator import Communicator, gather_values

BUCKETS = 8
"""Buckets of a step on a CPU. If the number of ranks divides it, work is shared evenly; ranks beyond it only wait."""


class GradientBuckets:
    """Gradients of a step's micro-batches, summed by bucket.

    Micro-batch i belongs to bucket i modulo the number of buckets, and bucket b to rank b modulo the number of ranks.

    On a CPU there are `BUCKETS` buckets for any number of ranks. Their sums are gathered and added in the order of
    the buckets, so ranks with one thread each give the same bits as one process with one thread. A process stores the
    gradients of its buckets, and at the end all gradients. On a GPU each rank has one bucket, and one collective adds
    them.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], world: Communicator, device: torch.device) -> None:
        self._parameters = parameters
        self._world = world
        self._ordered = device.type == "cpu"
        self._buckets = BUCKETS if self._ordered else world.size
        self._sums: dict[tuple[int, int], list[torch.Tensor]] = {}

    def owns(self, number: int) -> bool:
        """Whether this rank computes a micro-batch."""
        return number % self._buckets % self._world.size == self._world.rank

    def largest_share(self, count: int) -> int:
        """The largest number of `count` micro-batches that one rank computes."""
        return max(Counter(number % self._buckets % self._world.size for number in range(count)).values())

    def add(self, number: int, part: int, gradient: Sequence[torch.Tensor]) -> None:
        """Add the gradient of a part of a micro-batch, one tensor per parameter, which may later be modified."""
        key = (number % self._buckets, part if self._ordered else 0)
        if key in self._sums:
            torch._foreach_add_(self._sums[key], list(gradient))
        else:
            self._sums[key] = list(gradient)

    def total(self) -> list[torch.Tensor]:
        """The sum over all ranks, one tensor per parameter; every rank calls it once."""
        if self._world.size == 1:
            return _sum(self._sums[key] for key in sorted(self._sums))
        rows = [torch.cat([gradient.flatten() for gradient in self._sums[key]]) for key in sorted(self._sums)]
        if self._ordered:
            total = self._in_order(rows)
        else:
            total = self._world.all_reduce(rows[0] if rows else self._empty(1)[0])
        sizes = [parameter.numel() for parameter in self._parameters]
        return [
            part.view_as(parameter) for part, parameter in zip(torch.split(total, sizes), self._parameters, strict=True)
        ]

    def _in_order(self, rows: list[torch.Tensor]) -> torch.Tensor:
        keys = [tuple(key) for part in gather_values(sorted(self._sums), self._world) for key in part]
        gathered = torch.cat(self._world.gather(torch.stack(rows) if rows else self._empty(0)))
        places = sorted(range(len(keys)), key=keys.__getitem__)
        (total,) = _sum([gathered[place]] for place in places)
        return total

    def _empty(self, rows: int) -> torch.Tensor:
        first = self._parameters[0]
        return torch.zeros(rows, sum(parameter.numel() for parameter in self._parameters), device=first.device)


def _sum(gradients: Iterator[list[torch.Tensor]]) -> list[torch.Tensor]:
    """The sum in the given order; the first tensor is modified in place."""
    total = next(gradients)
    for gradient in gradients:
        torch._foreach_add_(total, gradient)
    return total
