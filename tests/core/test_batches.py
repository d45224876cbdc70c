"""Padded batches: every row once, and few sizes."""

import subprocess
import sys

import pytest
import torch
from solrl_core.precision.layers import QuantLinear
from solrl_core.sampling.batches import gpu_batch_sizes, padded_batches
from solrl_core.sampling.generator import FEWEST_ROWS, pad_to_min_rows
from torch import nn


@pytest.mark.parametrize(("count", "limit"), [(1, 24), (3, 24), (5, 24), (24, 24), (25, 24), (96, 48), (7, 2), (1, 1)])
def test_batches_on_a_cpu_hold_each_row_once_and_four_to_twelve(count: int, limit: int) -> None:
    cut = padded_batches(count, limit, torch.device("cpu"))
    assert [row for batch in cut for row in batch.rows[: batch.count]] == list(range(count))
    assert all(min(4, limit) <= len(batch.rows) <= min(12, limit) for batch in cut)
    assert all(set(batch.rows[batch.count :]) <= {batch.rows[batch.count - 1]} for batch in cut)


@pytest.mark.parametrize("limit", [24, 12, 6, 3, 2, 1])
@pytest.mark.parametrize("count", [1, 5, 6, 7, 18, 19, 24, 25, 30, 48, 97])
def test_batches_on_a_gpu_hold_each_row_once_and_have_two_sizes(count: int, limit: int) -> None:
    made = padded_batches(count, limit, torch.device("cuda"))
    assert [row for batch in made for row in batch.rows[: batch.count]] == list(range(count))
    assert {len(batch.rows) for batch in made} <= set(gpu_batch_sizes(limit))
    assert sum(len(batch.rows) for batch in made) - count < gpu_batch_sizes(limit)[1]


@pytest.mark.parametrize("quantised", [False, True], ids=["linear", "nvfp4"])
@torch.inference_mode()
def test_a_row_has_the_same_bits_among_any_number_of_rows(quantised: bool) -> None:
    torch.manual_seed(0)
    layer: nn.Module = nn.Linear(256, 192)
    model = nn.Sequential(QuantLinear.from_linear(layer) if quantised else layer)
    x = torch.randn(FEWEST_ROWS, 256)
    plain = model(x)
    pad_to_min_rows(model)
    assert torch.equal(model(x), plain)
    for count in range(FEWEST_ROWS):
        assert torch.equal(model(x[:count]), plain[:count])


def test_rows_of_tokens_are_not_padded() -> None:
    met: list[torch.Size] = []
    layer = nn.Linear(4, 4)
    layer.register_forward_hook(lambda module, inputs, output: met.append(output.shape))
    model = nn.Sequential(layer)
    pad_to_min_rows(model)
    assert model(torch.randn(2, 3, 4)).shape == (2, 3, 4)
    assert model(torch.randn(2, 4)).shape == (2, 4)
    assert met == [(2, 3, 4), (2, 4)]


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
