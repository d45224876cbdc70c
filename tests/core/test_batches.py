"""Padded batches: every row once, and few sizes."""

import pytest
import torch
from solrl_core.sampling.batches import gpu_batch_sizes, padded_batches


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
