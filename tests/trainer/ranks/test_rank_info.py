"""Several ranks: who is which, their shares, values and devices, and the network interface towards rank 0."""

import os
import socket

import pytest
import torch
from solrl_trainer.ranks.communicator import Communicator, gather_rows, gather_values, pick_device, require_equal, shard
from solrl_trainer.ranks.rank_info import RankInfo, read_rank_info
from solrl_trainer.ranks.rank_runtime import GLOO_INTERFACE, choose_interface
from tests.trainer.training_helpers import Ranks

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}


def test_a_rank_reads_its_rank_and_a_missing_variable_is_named() -> None:
    assert read_rank_info(TORCHRUN) == RankInfo(5, 8, 1)
    assert not read_rank_info(TORCHRUN).is_rank_zero
    for alone in ({}, {"WORLD_SIZE": "1"}, {"RANK": "0", "WORLD_SIZE": "1"}):
        assert read_rank_info(alone) == RankInfo()
        assert read_rank_info(alone).is_rank_zero
    for name in ("RANK", "LOCAL_RANK"):
        with pytest.raises(ValueError, match=f"{name} is not.*start with torchrun"):
            read_rank_info({key: value for key, value in TORCHRUN.items() if key != name})


ELSEWHERE = "192.0.2.1"
"""An address for documentation (RFC 5737); nothing is sent there."""


@pytest.fixture(autouse=True)
def _unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GLOO_INTERFACE, "")
    monkeypatch.delenv(GLOO_INTERFACE)


def test_gloo_uses_the_interface_towards_rank_0_unless_the_user_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as found:
        try:
            found.connect((ELSEWHERE, 9))
        except OSError:
            pytest.skip("this machine has no network")
    choose_interface(ELSEWHERE)
    assert os.environ[GLOO_INTERFACE] in [own for _, own in socket.if_nameindex() if own != "lo"]
    monkeypatch.setenv(GLOO_INTERFACE, "mine")
    choose_interface(ELSEWHERE)
    assert os.environ[GLOO_INTERFACE] == "mine"


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "::1"])
def test_gloo_chooses_on_one_machine(address: str) -> None:
    choose_interface(address)
    assert GLOO_INTERFACE not in os.environ


@pytest.mark.parametrize(("count", "size"), [(0, 1), (3, 1), (3, 2), (2, 3), (7, 3), (8, 4)])
def test_shares_are_all_items_in_order_and_rank_0_has_at_least_one(count: int, size: int) -> None:
    items = list(range(count))
    shares = [shard(items, Ranks(rank, size)) for rank in range(size)]
    assert [item for part in shares for item in part] == items
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert bool(shares[0]) == bool(items)


def test_values_of_all_ranks_keep_every_bit_and_must_be_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    value = {"sum": 0.1 + 0.2, "names": ["ä"], "none": None}
    assert gather_values(value, Ranks(1, 3)) == [value] * 3
    assert gather_values(value, Communicator()) == [value]
    rows = torch.rand(2, 3)
    assert torch.equal(gather_rows(rows, Ranks(0, 2)), torch.cat([rows, rows]))
    assert gather_rows(rows, Communicator()) is rows
    require_equal("the digest", "same", Ranks(0, 3))
    other = torch.frombuffer(bytearray(b'"other"'), dtype=torch.uint8)
    monkeypatch.setattr(Ranks, "gather", lambda _, tensor: [tensor, other])
    with pytest.raises(RuntimeError, match="the digest is this on rank 0; other on rank 1; expected the same on all"):
        require_equal("the digest", "this", Ranks(0, 2))


def test_each_rank_has_a_separate_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [pick_device("auto", Ranks(rank, 2)) for rank in range(2)] == ["cuda:0", "cuda:1"]
    assert pick_device("cuda", Ranks(1, 2)) == "cuda:1"
    assert pick_device("cpu", Ranks(1, 2)) == "cpu"
    assert [pick_device(name, Communicator()) for name in ("auto", "cuda", "cuda:1")] == ["cuda", "cuda", "cuda:1"]
    with pytest.raises(ValueError, match="got device cuda:5, and PyTorch finds 2 GPUs; expected a number below 2"):
        pick_device("cuda:5", Communicator())
    with pytest.raises(ValueError, match="device is cuda:1 for 2 ranks; expected auto, cuda or cpu"):
        pick_device("cuda:1", Ranks(1, 2))
    with pytest.raises(ValueError, match=r"rank 2 is number 2 of its machine, which has 2 GPUs.*--nproc-per-node 2"):
        pick_device("auto", Ranks(2, 3))
