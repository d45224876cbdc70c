"""Fairness between eight experiments, on one worker and on two, and between a small and a big request."""

import statistics
import threading
import time
from contextlib import ExitStack

from common import GROUP, client_of, counters, farthest, push_runs, race, request, service
from support.targets import Row

EXPERIMENTS = 8
WORKERS = 2


def sharing(rounds: int, seconds: float) -> Row:
    """Measure each experiment's share of candidates, and the total of all relative to one alone (median of rounds)."""
    names = [f"experiment-{i}" for i in range(EXPERIMENTS)]
    alone: list[int] = []
    together: list[dict[str, int]] = []
    with service() as url:
        push_runs(url, names)
        _count(url, names[:1], 5.0)
        # Interleaved, so that other load on the machine affects both.
        for turn in range(rounds):
            # Rotate the order: experiments that start earlier have an advantage when a round ends.
            order = names[turn % len(names) :] + names[: turn % len(names)]
            counts = (1, EXPERIMENTS) if turn % 2 == 0 else (EXPERIMENTS, 1)
            measured = {count: _count(url, order[:count], seconds) for count in counts}
            alone.append(sum(measured[1].values()))
            together.append(measured[EXPERIMENTS])
    each = {name: sum(part[name] for part in together) for name in names}
    off = farthest(each)
    ratios = [sum(part.values()) / one for part, one in zip(together, alone, strict=True)]
    ratio = statistics.median(ratios)
    return Row(
        "8 experiments on one service",
        "each within 10 % of equal; total ≥ 95 % of one alone",
        f"each within {off:.1%}; total {ratio:.1%} of one alone ({min(ratios):.0%} to {max(ratios):.0%} in {rounds})",
        off <= 0.10 and ratio >= 0.95,
        {"made": each, "ratios": ratios, "a_second_alone": sum(alone) / rounds / seconds},
    )


def sharing_workers(groups: int) -> Row:
    """Count each experiment's groups on two workers, until one has `groups`."""
    names = [f"experiment-{i}" for i in range(EXPERIMENTS)]
    with service("--workers", str(WORKERS)) as url, ExitStack() as stack:
        push_runs(url, names)
        clients = {name: stack.enter_context(client_of(url)) for name in names}
        made = race(
            clients,
            lambda name, root: request(name, 4, GROUP, root=root),
            lambda made, _: max(made.values()) >= groups,
        )
    off = farthest(made)
    return Row(
        f"{EXPERIMENTS} experiments on {WORKERS} workers of one service",
        "each within 10 % of equal",
        f"{min(made.values()):,} to {max(made.values()):,} groups of {GROUP}: each within {off:.1%}",
        off <= 0.10,
        {"made": made},
    )


def _count(url: str, names: list[str], seconds: float) -> dict[str, int]:
    """Candidates that each run receives within `seconds`, while every run always has work queued."""
    with ExitStack() as stack:
        clients = {name: stack.enter_context(client_of(url)) for name in names}
        made = race(
            clients,
            lambda name, root: request(name, 16, GROUP, root=root),
            lambda _, counted: counted >= seconds,
        )
    return {name: GROUP * groups for name, groups in made.items()}


def small_beside_big(trials: int) -> Row:
    """Count the chunks of a 96 × 48 request that run between a 24 × 1 request and its answer."""
    waits = []
    with service() as url:
        push_runs(url, ["big", "small"])
        first, done = threading.Event(), threading.Event()

        def ask() -> None:
            with client_of(url) as client:
                while not done.is_set():
                    client.rollouts(request("big", 48, 96), on_group=lambda _: first.set())

        big = threading.Thread(target=ask, daemon=True)
        big.start()
        first.wait()
        with client_of(url) as client:
            for trial in range(trials):
                before = counters(url)["solrl_chunks_total"]
                client.rollouts(request("small", 1, 24, root=trial))
                waits.append(int(counters(url)["solrl_chunks_total"] - before) - 1)
                time.sleep(0.37)
        done.set()
    return Row(
        "small (24 × 1) request during a big (96 × 48) one",
        "waits for at most 2 chunks",
        f"at most {max(waits)} in {trials} trials, mean {sum(waits) / trials:.2f}",
        max(waits) <= 2,
        {"chunks_waited": waits},
    )
