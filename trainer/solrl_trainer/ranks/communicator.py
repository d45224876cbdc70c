"""Ranks of a run. All ranks compute; only rank 0 writes files, reports and pushes."""

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from solrl_core.devices import require_device

from solrl_trainer.ranks.rank_info import RankInfo

Item = TypeVar("Item")


class Communicator:
    """Ranks of a run and their collectives, which every rank must call in the same order; here, one process alone.

    Attributes:
        rank: rank of this process, from 0.
        size: number of processes.
        local_rank: rank of this process on its machine, from 0.
        in_step: every rank computes as many passes as any, because they share the base's weights.
    """

    rank = 0
    size = 1
    local_rank = 0
    in_step = False

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum of all ranks' tensors, bit-equal on every rank."""
        return tensor

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """All ranks' tensors in the order of ranks, on every rank; their first axes may differ in length."""
        return [tensor]

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rank 0's tensor, on every rank; `tensor` has its shape. No rank returns before rank 0 has called it."""
        return tensor

    def notify(self, text: str) -> None:
        """Send a text to rank 0, without waiting."""

    def on_notice(self, handle: Callable[[str], object]) -> None:
        """On rank 0: call `handle` with the text of each notice, in another thread. Its error ends all ranks."""


def shard(items: Sequence[Item], world: Communicator) -> Sequence[Item]:
    """This rank's part of `items`. The parts of all ranks, in order, are `items`; later ranks may get fewer."""
    start, stop = (-(-len(items) * rank // world.size) for rank in (world.rank, world.rank + 1))
    return items[start:stop]


def gather_rows(tensor: torch.Tensor, world: Communicator) -> torch.Tensor:
    """The rows of all ranks, in the order of ranks."""
    return torch.cat(world.gather(tensor)) if world.size > 1 else tensor


def gather_values(value: Any, world: Communicator) -> list[Any]:
    """JSON values of all ranks, in the order of ranks."""
    if world.size == 1:
        return [value]
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    return [json.loads(bytes(part.tolist())) for part in world.gather(text)]


def broadcast_bytes(data: bytes | None, world: Communicator) -> bytes:
    """Rank 0's bytes, on every rank; all other ranks pass None."""
    if world.size == 1:
        assert data is not None
        return data
    length = int(world.broadcast(torch.tensor(len(data or b""))))
    sent = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(length, dtype=torch.uint8)
    return world.broadcast(sent).numpy().tobytes()


def require_equal(what: str, value: str, world: Communicator) -> None:
    """Stop a run whose ranks have diverged in a value, by a RuntimeError that names the ranks and their values."""
    values = gather_values(value, world)
    if len(set(values)) > 1:
        ranks = {value: [rank for rank, reported in enumerate(values) if reported == value] for value in values}
        named = "; ".join(f"{value} on rank {', '.join(map(str, where))}" for value, where in ranks.items())
        raise RuntimeError(
            f"the ranks have diverged: {what} is {named}; expected the same on all. Look for a machine with other "
            "software or a faulty device"
        )


def pick_device(name: str, process: Communicator | RankInfo) -> str:
    """Resolve a device name; `auto` is CUDA if available, otherwise the CPU. Each of several ranks uses a separate GPU.

    Raises:
        ValueError: this machine lacks the device, or has no separate GPU for this rank.
    """
    name = require_device(name)
    if process.size == 1 or not name.startswith("cuda"):
        return name
    if name != "cuda":
        raise ValueError(f"device is {name} for {process.size} ranks; expected auto, cuda or cpu: each has its own GPU")
    count = torch.cuda.device_count()
    if process.local_rank >= count:
        raise ValueError(
            f"rank {process.rank} is number {process.local_rank} of its machine, which has {count} GPUs; expected "
            f"at most one rank per GPU: torchrun --nproc-per-node {count}"
        )
    return f"cuda:{process.local_rank}"


def wait_for_rank_zero(world: Communicator) -> None:
    """Wait until rank 0 has reached this point."""
    if world.size > 1:
        world.broadcast(torch.zeros(1))
