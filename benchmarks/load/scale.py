"""What a candidate costs as requests and experiments grow in number."""

import statistics
import threading
import time
from pathlib import Path
from typing import Any

from common import Row, client_of, push_runs, request, seconds_of, service

SIZES = (24, 96, 480, 2400, 10_000)
EXPERIMENTS = (1, 2, 5, 10, 25, 50)
_STEPS = 2


def scale(repeats: int) -> Row:
    """Milliseconds a candidate, by the size of a request and by the number of experiments; the largest excess."""
    with service("--retain", "2") as url:
        push_runs(url, [f"experiment-{i}" for i in range(max(EXPERIMENTS))])
        by_size = _by_size(url, repeats)
        by_experiments = _by_experiments(url, repeats)
    worst = max(max(cost.values()) / cost[min(cost)] - 1 for cost in (by_size, by_experiments))
    return Row(
        f"cost of a candidate at {_STEPS} steps, request 24 → 10,000, experiments 1 → 50",
        "flat within 10 %",
        f"at most {worst:+.1%} above that of the smallest",
        worst <= 0.10,
        {"ms_by_request_size": by_size, "ms_by_experiments": by_experiments},
    )


def _by_size(url: str, repeats: int) -> dict[int, float]:
    costs: dict[int, list[float]] = {size: [] for size in SIZES}
    with client_of(url) as client:
        client.rollouts(request(None, 1, 96, steps=_STEPS))
        for repeat in range(repeats):
            for size in SIZES:
                # As many requests as have candidates enough to be measured, at most one of the largest.
                times = max(1, 480 // size)
                prompts, candidates = (size // 24, 24) if size % 24 == 0 else (size // 50, 50)

                def ask(
                    times: int = times, prompts: int = prompts, candidates: int = candidates, root: int = repeat
                ) -> None:
                    for _ in range(times):
                        client.rollouts(request(None, prompts, candidates, steps=_STEPS, root=root))

                costs[size].append(1000 * seconds_of(ask) / (times * prompts * candidates))
    return {size: statistics.median(found) for size, found in costs.items()}


def _by_experiments(url: str, repeats: int) -> dict[int, float]:
    """Each experiment asks for groups of 96, two at a time, as one that looks ahead does."""
    costs: dict[int, list[float]] = {count: [] for count in EXPERIMENTS}
    for repeat in range(repeats):
        for count in EXPERIMENTS:
            groups = max(2, 24 // count)

            def ask(name: str, groups: int = groups, root: int = repeat) -> None:
                with client_of(url) as client:
                    client.rollouts(request(name, groups, 96, steps=_STEPS, root=root))

            threads = [threading.Thread(target=ask, args=(f"experiment-{i}",)) for i in range(count)]
            start = time.perf_counter()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            costs[count].append(1000 * (time.perf_counter() - start) / (count * groups * 96))
    return {count: statistics.median(found) for count, found in costs.items()}


def plot(figures: dict[str, Any], file: Path) -> None:
    """Both costs, relative to their smallest case."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(8, 3), layout="constrained", sharey=True)
    parts = (("ms_by_request_size", "candidates a request"), ("ms_by_experiments", "experiments at a time"))
    for axis, (key, label) in zip(axes, parts, strict=True):
        cost = {int(count): ms for count, ms in figures[key].items()}
        base = cost[min(cost)]
        axis.axhspan(0.9, 1.1, color="0.93")
        axis.plot(list(cost), [ms / base for ms in cost.values()], marker="o", color="#0a6ebd")
        axis.set_xscale("log")
        axis.set_xticks(list(cost), [f"{count:,}" for count in cost])
        axis.minorticks_off()
        axis.set_xlabel(label)
        axis.set_ylim(0.5, 1.5)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    axes[0].set_ylabel("cost of a candidate, relative")
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
