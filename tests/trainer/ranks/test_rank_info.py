"""Rank and size of a process, from the environment that torchrun sets."""

import pytest
from solrl_trainer.ranks.rank_info import RankInfo, read_rank_info

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "node-0", "MASTER_PORT": "29500"}


def test_a_rank_reads_its_rank() -> None:
    assert read_rank_info(TORCHRUN) == RankInfo(5, 8, 1, "node-0", 29500)
    assert not read_rank_info(TORCHRUN).is_rank_zero


@pytest.mark.parametrize("environment", [{}, {"WORLD_SIZE": "1"}, {"RANK": "0", "WORLD_SIZE": "1"}])
def test_a_single_process_is_rank_0_of_1(environment: dict[str, str]) -> None:
    assert read_rank_info(environment) == RankInfo()
    assert read_rank_info(environment).is_rank_zero


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_a_missing_variable_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is not.*start with torchrun"):
        read_rank_info({key: value for key, value in TORCHRUN.items() if key != name})


def test_one_rank_per_machine_prints() -> None:
    """Eight ranks on two machines."""
    infos = [RankInfo(rank, 8, rank % 4) for rank in range(8)]
    assert [info.rank for info in infos if info.prints_for_node()] == [0, 4]
    assert [info.rank for info in infos if info.prints_for_node(died=0)] == [1, 4]
    assert [info.rank for info in infos if info.prints_for_node(died=4)] == [0, 5]
    assert [info.rank for info in infos if info.prints_for_node(died=2)] == [0, 4]
