"""Place of a process among those that torchrun started."""

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Place of a process among those that train one run.

    Attributes:
        rank, size: this process, from 0, and the number of processes.
        local_rank: this process among those of its machine, which is also its GPU.
        address, port: where rank 0's machine answers; unused by a process alone.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    address: str = ""
    port: int = 0

    @property
    def first(self) -> bool:
        """Whether this process is rank 0, which alone writes and talks."""
        return self.rank == 0

    def speaks(self, lost: int | None = None) -> bool:
        """Whether this process talks for its machine: its first rank, or the second if the first was lost."""
        first = self.rank - self.local_rank
        return self.rank == (first + 1 if lost == first else first)


def read_place(environment: Mapping[str, str] = os.environ) -> Place:
    """The place that torchrun gave this process by its environment; a process alone without torchrun.

    Raises:
        ValueError: a variable is missing or is no number.
    """
    if environment.get("WORLD_SIZE", "1") == "1":
        return Place()
    numbers = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        value = environment.get(name, "")
        if not value.isdecimal():
            raise ValueError(
                f"WORLD_SIZE is {environment['WORLD_SIZE']}, and {name} is {value or 'not set'}; expected a number: "
                "start with torchrun, which sets both, or unset WORLD_SIZE to train in one process"
            )
        numbers[name] = int(value)
    address = environment.get("MASTER_ADDR", "")
    if not address:
        raise ValueError("WORLD_SIZE is set, and MASTER_ADDR is not; start with torchrun, or unset WORLD_SIZE")
    return Place(numbers["RANK"], numbers["WORLD_SIZE"], numbers["LOCAL_RANK"], address, numbers["MASTER_PORT"])
