"""Shares, values and devices of several ranks."""

import pytest
import torch
from solrl_trainer.ranks.communicator import (
    SingleProcess,
    gather_rows,
    gather_values,
    pick_device,
    require_equal,
    share,
)


class Ranks:
    """A world of some size, from the view of one rank."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.local_rank = rank, size, rank

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor * self.size

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor] * self.size

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


@pytest.mark.parametrize(("count", "size"), [(0, 1), (3, 1), (3, 2), (2, 3), (7, 3), (8, 4)])
def test_shares_are_all_items_in_order_and_rank_0_has_at_least_one(count: int, size: int) -> None:
    items = list(range(count))
    shares = [share(items, Ranks(rank, size)) for rank in range(size)]
    assert [item for part in shares for item in part] == items
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert bool(shares[0]) == bool(items)


def test_values_of_all_ranks_keep_every_bit() -> None:
    value = {"sum": 0.1 + 0.2, "names": ["ä"], "none": None}
    assert gather_values(value, Ranks(1, 3)) == [value] * 3
    assert gather_values(value, SingleProcess()) == [value]
    rows = torch.rand(2, 3)
    assert torch.equal(gather_rows(rows, Ranks(0, 2)), torch.cat([rows, rows]))
    assert gather_rows(rows, SingleProcess()) is rows


class Apart(Ranks):
    """Two ranks, of which the second has a different value."""

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor, torch.frombuffer(bytearray(b'"other"'), dtype=torch.uint8)]


def test_ranks_with_different_values_stop() -> None:
    require_equal("the digest", "same", Ranks(0, 3))
    with pytest.raises(RuntimeError, match="the digest is this on rank 0; other on rank 1; expected the same on all"):
        require_equal("the digest", "this", Apart(0, 2))


def test_each_rank_has_a_separate_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [pick_device("auto", Ranks(rank, 2)) for rank in range(2)] == ["cuda:0", "cuda:1"]
    assert pick_device("cuda", Ranks(1, 2)) == "cuda:1"
    assert pick_device("cpu", Ranks(1, 2)) == "cpu"
    assert [pick_device(name, SingleProcess()) for name in ("auto", "cuda", "cuda:5")] == ["cuda", "cuda", "cuda:5"]
    with pytest.raises(ValueError, match="device is cuda:1 for 2 ranks; expected auto, cuda or cpu"):
        pick_device("cuda:1", Ranks(1, 2))
    with pytest.raises(ValueError, match=r"rank 2 is number 2 of its machine, which has 2 GPUs.*--nproc-per-node 2"):
        pick_device("auto", Ranks(2, 3))
