"""Threads of a CPU: each item is computed by one, whatever torch's number of threads was or is."""

import subprocess
import sys

import pytest

PROGRAM = """
import os, torch
from solrl_core.sampling.cpu_threads import thread_count, map_in_threads

for first, then in ((1, 2), (2, 2), (2, 1), (1, 1)):
    if not os.fork():
        torch.set_num_threads(first)
        thread_count()
        torch.set_num_threads(then)
        print(*map_in_threads(lambda _: torch.get_num_threads(), range(3), torch.device("cpu")), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.mark.slow
def test_each_item_is_computed_by_one_thread() -> None:
    """Each case in a process of its own, because a process keeps its first number of threads."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1"] * 3 * 4
