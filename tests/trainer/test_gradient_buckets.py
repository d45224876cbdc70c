"""Sums of gradients over ranks: bit-equal for any number of ranks on a CPU, and one collective on a GPU."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from solrl_trainer.policy.gradient_buckets import BUCKETS, GradientBuckets
from solrl_trainer.ranks.communicator import Communicator

CPU, GPU = torch.device("cpu"), torch.device("cuda")
PARAMETERS = [torch.zeros(5, 3), torch.zeros(7)]


class Threads(Communicator):
    """One rank of a world of threads."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, given: dict[int, torch.Tensor]) -> None:
        self.rank, self.size = rank, size
        self._barrier, self._given = barrier, given

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._given[self.rank] = tensor
        self._barrier.wait(600)
        found = [self._given[rank] for rank in range(self.size)]
        self._barrier.wait(600)
        return found

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.gather(tensor)).sum(0)


def gradient(number: int, part: int = 0) -> list[torch.Tensor]:
    """Gradients of very different sizes, so that the order of a sum affects its last bits."""
    generator = torch.Generator().manual_seed(100 * number + part)
    return [torch.randn(one.shape, generator=generator) * 10 ** (number % 5) for one in PARAMETERS]


def totals(size: int, count: int, device: torch.device = CPU, parts: int = 1) -> list[list[torch.Tensor]]:
    """The total of `count` micro-batches on each rank; exactly one rank computes each."""
    computed: list[int] = []
    barrier, given = threading.Barrier(size), dict[int, torch.Tensor]()

    def work(rank: int) -> list[torch.Tensor]:
        gradients = GradientBuckets(PARAMETERS, Threads(rank, size, barrier, given), device)
        for number in range(count):
            if gradients.owns(number):
                computed.append(number)
                for part in range(parts):
                    gradients.add(number, part, gradient(number, part))
        return gradients.total()

    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(work, range(size)))
    assert sorted(computed) == list(range(count))
    return found


@pytest.mark.parametrize("count", [1, 3, 8, 21])
@pytest.mark.parametrize("size", [2, 3, 4, 8, 10])
def test_any_number_of_ranks_gives_the_same_bits(size: int, count: int) -> None:
    ((first, second),) = totals(1, count)
    assert [first.shape, second.shape] == [one.shape for one in PARAMETERS]
    for total in totals(size, count):
        assert torch.equal(total[0], first)
        assert torch.equal(total[1], second)
    # Another order gives others, or the above could not fail.
    gradients = [gradient(number)[0] for number in range(21)]
    assert not torch.equal(sum(gradients), sum(reversed(gradients)))


@pytest.mark.parametrize(("size", "count", "most"), [(1, 5, 5), (2, 5, 3), (3, 9, 4), (10, 9, 2)])
def test_the_largest_share_is_known(size: int, count: int, most: int) -> None:
    """With eight buckets, three ranks have three, three and two."""
    ranks = [GradientBuckets(PARAMETERS, Threads(rank, size, threading.Barrier(1), {}), CPU) for rank in range(size)]
    assert ranks[0].largest_share(count) == max(sum(map(rank.owns, range(count))) for rank in ranks) == most


def test_one_process_adds_few_micro_batches_in_their_order() -> None:
    ((first, _),) = totals(1, BUCKETS, parts=2)
    expected = torch.zeros_like(first)
    for number in range(BUCKETS):
        for part in range(2):
            expected += gradient(number, part)[0]
    assert torch.equal(first, expected)


@pytest.mark.parametrize(("size", "count"), [(1, 5), (2, 5), (3, 2)])
def test_on_a_gpu_each_rank_has_one_sum(size: int, count: int) -> None:
    exact = sum(gradient(number)[0].double() for number in range(count))
    found = totals(size, count, GPU)
    for total in found:
        assert torch.equal(total[0], found[0][0])
        torch.testing.assert_close(total[0].double(), exact, rtol=1e-5, atol=1e-2)
