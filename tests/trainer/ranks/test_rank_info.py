"""Rank and size of a process, from the environment that torchrun sets."""

import pytest
from solrl_trainer.ranks.rank_info import RankInfo, read_rank_info

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}


def test_a_rank_reads_its_rank() -> None:
    assert read_rank_info(TORCHRUN) == RankInfo(5, 8, 1)
    assert not read_rank_info(TORCHRUN).is_rank_zero


@pytest.mark.parametrize("environment", [{}, {"WORLD_SIZE": "1"}, {"RANK": "0", "WORLD_SIZE": "1"}])
def test_a_single_process_is_rank_0_of_1(environment: dict[str, str]) -> None:
    assert read_rank_info(environment) == RankInfo()
    assert read_rank_info(environment).is_rank_zero


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK"])
def test_a_missing_variable_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is not.*start with torchrun"):
        read_rank_info({key: value for key, value in TORCHRUN.items() if key != name})
