"""Lanes: work of a CPU runs on one thread each, whatever torch's number of threads was or is."""

import subprocess
import sys

import pytest

PROGRAM = """
import torch
from solrl_core.sampling.cpu_threads import thread_count, map_in_threads

torch.set_num_threads({first})
thread_count()
torch.set_num_threads({then})
print(*map_in_threads(lambda _: torch.get_num_threads(), range(3), torch.device("cpu")))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [(1, 2), (2, 2), (2, 1), (1, 1)])
def test_each_item_is_computed_by_one_thread(first: int, then: int) -> None:
    program = PROGRAM.format(first=first, then=then)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1"] * 3
