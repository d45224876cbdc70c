"""What a candidate costs as requests and experiments grow in number."""

import statistics
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from common import Row, client_of, push_runs, request, seconds_of, service
from solrl_trainer.client import RolloutClient

SIZES = {24: (1, 24), 96: (4, 24), 480: (20, 24), 2400: (100, 24), 9984: (208, 48)}
"""Candidates of a request: prompts × candidates each, so that every chunk is one of 24. A request has at most 256
prompts, so the largest has two chunks a prompt."""
EXPERIMENTS = {1: 24, 2: 12, 5: 5, 10: 2, 25: 1, 50: 1}
"""Experiments at a time: the groups of 96 that each asks for."""
YARDSTICK = (20, 24)
_STEPS = 2

Costs = dict[int, list[float]]


def scale(
    repeats: int = 3,
    shapes: dict[int, tuple[int, int]] = SIZES,
    groups: dict[int, int] = EXPERIMENTS,
    enough: int = 960,
) -> Row:
    """Milliseconds a candidate, by the size of a request and by the number of experiments; dearest against cheapest.

    Args:
        repeats: times that each is measured; the median counts.
        shapes: see `SIZES`.
        groups: see `EXPERIMENTS`.
        enough: candidates that a measurement of a request's size takes at least.
    """
    by_size: Costs = {size: [] for size in shapes}
    by_experiments: Costs = {count: [] for count in groups}
    with service("--retain", "2") as url:
        push_runs(url, [f"experiment-{i}" for i in range(max(groups))])
        _by_experiments(url, 2, 2, 0)
        paced = Paced(lambda: _by_size(url, YARDSTICK, 2, 0))
        for repeat in range(repeats):
            way = 1 if repeat % 2 == 0 else -1
            for size in list(by_size)[::way]:
                times = max(1, enough // size)
                by_size[size].append(paced.cost(partial(_by_size, url, shapes[size], times, repeat)))
            for count in list(by_experiments)[::way]:
                by_experiments[count].append(paced.cost(partial(_by_experiments, url, count, groups[count], repeat)))
    usual = statistics.median(paced.yardsticks)
    sizes, experiments = _medians(by_size, usual), _medians(by_experiments, usual)
    return Row(
        f"cost of a candidate at {_STEPS} steps, request {min(sizes)} → {max(sizes):,}, "
        f"experiments {min(experiments)} → {max(experiments)}",
        "flat within 10 %: dearest against cheapest of each curve",
        f"requests {_extremes(sizes)}; experiments {_extremes(experiments)}",
        max(_spread(sizes), _spread(experiments)) <= 0.10,
        {
            "ms_by_request_size": sizes,
            "ms_by_experiments": experiments,
            "all_by_request_size": by_size,
            "all_by_experiments": by_experiments,
            "yardstick_ms": paced.yardsticks,
        },
    )


class Paced:
    """Measures in units of a yardstick's cost before and after, because the speed of a shared machine wanders.

    Attributes:
        yardsticks: its costs, in the order in which they were measured.
    """

    def __init__(self, yardstick: Callable[[], float]) -> None:
        self._yardstick = yardstick
        self.yardsticks = [yardstick()]

    def cost(self, measure: Callable[[], float]) -> float:
        """What `measure` finds, over the mean of the yardsticks beside it."""
        found = measure()
        self.yardsticks.append(self._yardstick())
        return found / statistics.mean(self.yardsticks[-2:])


def _medians(costs: Costs, unit: float) -> dict[int, float]:
    return {of: statistics.median(found) * unit for of, found in costs.items()}


def _spread(cost: dict[int, float]) -> float:
    return max(cost.values()) / min(cost.values()) - 1


def _extremes(cost: dict[int, float]) -> str:
    cheapest, dearest = min(cost, key=cost.__getitem__), max(cost, key=cost.__getitem__)
    said = f"{cost[cheapest]:.2f} ms at {cheapest:,} to {cost[dearest]:.2f} ms at {dearest:,}"
    return f"{_spread(cost):+.1%} ({said})"


def _by_size(url: str, shape: tuple[int, int], times: int, root: int) -> float:
    """Milliseconds a candidate of requests one after the other."""
    prompts, candidates = shape
    with client_of(url) as client:

        def ask() -> None:
            for _ in range(times):
                client.rollouts(request(None, prompts, candidates, steps=_STEPS, root=root))

        return 1000 * seconds_of(ask) / (times * prompts * candidates)


def _by_experiments(url: str, count: int, groups: int, root: int) -> float:
    """Milliseconds a candidate of so many experiments at a time."""
    with ExitStack() as stack:
        # Made before: a trainer has its client, whose certificates take long to read, for as long as it runs.
        clients = [stack.enter_context(client_of(url)) for _ in range(count)]

        def ask(client: RolloutClient, name: str) -> None:
            client.rollouts(request(name, groups, 96, steps=_STEPS, root=root))

        threads = [threading.Thread(target=ask, args=(client, f"experiment-{i}")) for i, client in enumerate(clients)]

        def together() -> None:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        return 1000 * seconds_of(together) / (count * groups * 96)


def plot(figures: dict[str, Any], file: Path) -> None:
    """Both costs, relative to their cheapest case."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(8, 3), layout="constrained", sharey=True)
    parts = (("ms_by_request_size", "candidates a request"), ("ms_by_experiments", "experiments at a time"))
    for axis, (key, label) in zip(axes, parts, strict=True):
        cost = {int(count): ms for count, ms in figures[key].items()}
        base = min(cost.values())
        axis.axhspan(1.0, 1.1, color="0.93")
        axis.plot(list(cost), [ms / base for ms in cost.values()], marker="o", color="#0a6ebd")
        axis.set_xscale("log")
        axis.set_xticks(list(cost), [f"{count:,}" for count in cost])
        axis.minorticks_off()
        axis.set_xlabel(label)
        axis.set_ylim(0.8, 1.4)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    axes[0].set_ylabel("cost of a candidate / cheapest")
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
