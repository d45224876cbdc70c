"""Rank and world size of a process that torchrun started."""

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class RankInfo:
    """Rank of a process in a run, and on its node, where it is also the index of its GPU; both from 0."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def is_rank_zero(self) -> bool:
        """Whether this process is rank 0, the only one that writes files and prints."""
        return self.rank == 0


def read_rank_info(environment: Mapping[str, str] = os.environ) -> RankInfo:
    """The rank by torchrun's variables; without these, of a single process. ValueError: one is missing or no number."""
    if environment.get("WORLD_SIZE", "1") == "1":
        return RankInfo()
    numbers = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        value = environment.get(name, "")
        if not value.isdecimal():
            raise ValueError(
                f"WORLD_SIZE is {environment['WORLD_SIZE']}, and {name} is {value or 'not set'}; expected a number: "
                "start with torchrun, which sets both, or unset WORLD_SIZE to train in one process"
            )
        numbers[name] = int(value)
    return RankInfo(numbers["RANK"], numbers["WORLD_SIZE"], numbers["LOCAL_RANK"])
