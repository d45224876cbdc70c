"""Cost per candidate as requests grow and experiments become more numerous."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from common import client_of, push_runs, request, seconds_of, service
from solrl_client.rollouts import RolloutClient
from support.targets import Row

SIZES = {24: (1, 24), 96: (4, 24), 480: (20, 24), 2400: (100, 24), 9984: (208, 48)}
"""Candidates of a request → (prompts, candidates each), so that every chunk has 24. A request has at most 256 prompts,
so the largest has two chunks per prompt."""
EXPERIMENTS = (1, 2, 5, 10, 25, 50)
"""Concurrent experiments; the total number of groups of 96 is always about the largest number of experiments."""
_STEPS = 2

Seconds = dict[int, list[float]]


def scale(
    rounds: int = 4, shapes: dict[int, tuple[int, int]] = SIZES, experiments: tuple[int, ...] = EXPERIMENTS
) -> Row:
    """Measure milliseconds per candidate by request size and by number of experiments.

    The same amount of work is split differently: small requests run one after the other until they have generated as
    many candidates as the largest request, and likewise for experiments. All cases are measured for about the same
    time, alternating in forward and backward order, because the speed of a shared machine drifts. Within a round it
    drifts by more than the effect in question, so the result is a mean over several rounds. The JSON holds the seconds
    of each round.

    Args:
        rounds: number of rounds; even, so that linear drift cancels.
        shapes: see `SIZES`.
        experiments: see `EXPERIMENTS`.
    """
    largest, most = max(shapes), max(experiments)
    by_size: Seconds = {size: [] for size in shapes}
    by_experiments: Seconds = {count: [] for count in experiments}
    with service("--retain", "2") as url:
        push_runs(url, [f"experiment-{i}" for i in range(most)])
        _together(url, most, 1, 0)
        for turn in range(rounds):
            for size in _in_turn(shapes, turn):
                by_size[size].append(_requests(url, shapes[size], largest // size, turn))
            for count in _in_turn(experiments, turn):
                by_experiments[count].append(_together(url, count, most // count, turn))
    sizes = {size: _ms(seconds, largest // size * size) for size, seconds in by_size.items()}
    numbers = {count: _ms(seconds, most // count * count * 96) for count, seconds in by_experiments.items()}
    return Row(
        f"cost per candidate at {_STEPS} steps, request {min(sizes)} → {max(sizes):,}, "
        f"experiments {min(numbers)} → {max(numbers)}",
        "largest and smallest cost of each curve differ by ≤ 10 %",
        f"requests {_extremes(sizes)}; experiments {_extremes(numbers)}",
        max(_spread(sizes), _spread(numbers)) <= 0.10,
        {
            "ms_by_request_size": sizes,
            "ms_by_experiments": numbers,
            "seconds_by_request_size": by_size,
            "seconds_by_experiments": by_experiments,
        },
    )


def _in_turn(cases: Iterable[int], turn: int) -> list[int]:
    return sorted(cases, reverse=turn % 2 == 1)


def _ms(seconds: list[float], candidates: int) -> float:
    return 1000 * sum(seconds) / len(seconds) / candidates


def _spread(cost: dict[int, float]) -> float:
    return max(cost.values()) / min(cost.values()) - 1


def _extremes(cost: dict[int, float]) -> str:
    cheapest, dearest = min(cost, key=cost.__getitem__), max(cost, key=cost.__getitem__)
    extremes = f"{cost[cheapest]:.2f} ms at {cheapest:,} to {cost[dearest]:.2f} ms at {dearest:,}"
    return f"{_spread(cost):+.1%} ({extremes})"


def _requests(url: str, shape: tuple[int, int], times: int, root: int) -> float:
    """Seconds of `times` sequential requests."""
    prompts, candidates = shape
    with client_of(url) as client:

        def ask() -> None:
            for _ in range(times):
                client.rollouts(request(None, prompts, candidates, steps=_STEPS, root=root))

        return seconds_of(ask)


def _together(url: str, count: int, groups: int, root: int) -> float:
    """Seconds of `count` concurrent experiments."""
    with ExitStack() as stack:
        # Create the clients first: a trainer keeps its client, which is slow to create because it reads certificates.
        clients = [stack.enter_context(client_of(url)) for _ in range(count)]

        def ask(client: RolloutClient, name: str) -> None:
            client.rollouts(request(name, groups, 96, steps=_STEPS, root=root))

        with ThreadPoolExecutor(count) as pool:
            return seconds_of(lambda: list(pool.map(ask, clients, [f"experiment-{i}" for i in range(count)])))
