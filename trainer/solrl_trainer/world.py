"""The processes that train one run together. All compute; only rank 0 writes files, reports and pushes."""

import json
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import torch

Item = TypeVar("Item")


class World(Protocol):
    """Ranks of a run and their collectives, which every rank must call in the same order."""

    @property
    def rank(self) -> int:
        """This process, from 0."""

    @property
    def size(self) -> int:
        """Number of processes."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum of all ranks' tensors, bit-equal on every rank."""

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """All ranks' tensors in the order of ranks, on every rank; their first axes may differ in length."""

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rank 0's tensor, on every rank; `tensor` has its shape. No rank returns before rank 0 has called it."""


class SoloWorld:
    """One process."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return tensor

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensor alone."""
        return [tensor]

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return tensor


def share(items: Sequence[Item], world: World) -> Sequence[Item]:
    """This rank's part of `items`; the parts of all ranks, in their order, are `items`. Later ranks may get less."""
    start, stop = (-(-len(items) * rank // world.size) for rank in (world.rank, world.rank + 1))
    return items[start:stop]


def gather_rows(tensor: torch.Tensor, world: World) -> torch.Tensor:
    """The rows of all ranks, in the order of ranks."""
    return torch.cat(world.gather(tensor)) if world.size > 1 else tensor


def gather_values(value: Any, world: World) -> list[Any]:
    """JSON values of all ranks, in the order of ranks."""
    if world.size == 1:
        return [value]
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    return [json.loads(bytes(part.tolist())) for part in world.gather(text)]


def wait_for_first(world: World) -> None:
    """Wait until rank 0 has reached this point."""
    if world.size > 1:
        world.broadcast(torch.zeros(1))
