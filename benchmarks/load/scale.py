"""What a candidate costs as requests and experiments grow in number."""

import threading
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import Row, client_of, push_runs, request, seconds_of, service
from solrl_trainer.client import RolloutClient

SIZES = {24: (1, 24), 96: (4, 24), 480: (20, 24), 2400: (100, 24), 9984: (208, 48)}
"""Candidates of a request: prompts × candidates each, so that every chunk is one of 24. A request has at most 256
prompts, so the largest has two chunks a prompt."""
EXPERIMENTS = {1: 10, 2: 5, 5: 2, 10: 1, 25: 1, 50: 1}
"""Experiments at a time: the groups of 96 that each asks for."""
_STEPS = 2


@dataclass
class Cost:
    """What so many candidates have taken until now."""

    seconds: list[float] = field(default_factory=list)
    candidates: int = 0

    @property
    def ms(self) -> float:
        """Milliseconds a candidate."""
        return 1000 * sum(self.seconds) / self.candidates


Costs = dict[int, Cost]


def scale(
    rounds: int = 10,
    shapes: dict[int, tuple[int, int]] = SIZES,
    groups: dict[int, int] = EXPERIMENTS,
    enough: int = 960,
) -> Row:
    """Milliseconds a candidate, by the size of a request and by the number of experiments; dearest against cheapest.

    All take turns, and are measured for about as long, because the speed of a shared machine wanders.

    Args:
        rounds: in each, what was measured for less than `enough` candidates a round is measured again.
        shapes: see `SIZES`.
        groups: see `EXPERIMENTS`.
        enough: candidates of a measurement of a request's size, at least.
    """
    by_size: Costs = {size: Cost() for size in shapes}
    by_experiments: Costs = {count: Cost() for count in groups}
    with service("--retain", "2") as url:
        push_runs(url, [f"experiment-{i}" for i in range(max(groups))])
        _together(url, 2, 2, 0)
        for turn in range(rounds):
            for size, cost in by_size.items():
                if cost.candidates <= turn * enough:
                    times = max(1, enough // size)
                    cost.seconds.append(_requests(url, shapes[size], times, turn))
                    cost.candidates += times * size
            for count, cost in by_experiments.items():
                if cost.candidates <= turn * enough:
                    cost.seconds.append(_together(url, count, groups[count], turn))
                    cost.candidates += count * groups[count] * 96
    sizes, experiments = _ms(by_size), _ms(by_experiments)
    return Row(
        f"cost of a candidate at {_STEPS} steps, request {min(sizes)} → {max(sizes):,}, "
        f"experiments {min(experiments)} → {max(experiments)}",
        "flat within 10 %: dearest against cheapest of each curve",
        f"requests {_extremes(sizes)}; experiments {_extremes(experiments)}",
        max(_spread(sizes), _spread(experiments)) <= 0.10,
        {
            "ms_by_request_size": sizes,
            "ms_by_experiments": experiments,
            "seconds_by_request_size": {size: cost.seconds for size, cost in by_size.items()},
            "seconds_by_experiments": {count: cost.seconds for count, cost in by_experiments.items()},
        },
    )


def _ms(costs: Costs) -> dict[int, float]:
    return {of: cost.ms for of, cost in costs.items()}


def _spread(cost: dict[int, float]) -> float:
    return max(cost.values()) / min(cost.values()) - 1


def _extremes(cost: dict[int, float]) -> str:
    cheapest, dearest = min(cost, key=cost.__getitem__), max(cost, key=cost.__getitem__)
    said = f"{cost[cheapest]:.2f} ms at {cheapest:,} to {cost[dearest]:.2f} ms at {dearest:,}"
    return f"{_spread(cost):+.1%} ({said})"


def _requests(url: str, shape: tuple[int, int], times: int, root: int) -> float:
    """Seconds of requests one after the other."""
    prompts, candidates = shape
    with client_of(url) as client:

        def ask() -> None:
            for _ in range(times):
                client.rollouts(request(None, prompts, candidates, steps=_STEPS, root=root))

        return seconds_of(ask)


def _together(url: str, count: int, groups: int, root: int) -> float:
    """Seconds of so many experiments at a time."""
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

        return seconds_of(together)


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
