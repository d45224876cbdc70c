"""Fairness between experiments, on one worker and on two, of a small and a big request, and of two tenants."""

import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path

from common import GROUP, adapter_file, client_of, counters, farthest, push_runs, race, request, service
from fault_trials.adapters import MODEL, layout
from solrl_http.tokens import create_token
from solrl_proto.rollouts import RolloutRequest
from support.targets import Row

EXPERIMENTS = [f"experiment-{i}" for i in range(8)]
WORKERS = 2
NAMES = [f"new-{i}" for i in range(260)]


def sharing(rounds: int, seconds: float) -> Row:
    """Measure each experiment's share of candidates, and the total of all relative to one alone (median of rounds)."""
    alone: list[int] = []
    together: list[dict[str, int]] = []
    with service() as url:
        push_runs(url, EXPERIMENTS)
        _candidates(url, EXPERIMENTS[:1], 5.0)
        # Interleaved, so that other load on the machine affects both.
        for turn in range(rounds):
            # Rotate the order: experiments that start earlier have an advantage when a round ends.
            order = EXPERIMENTS[turn % 8 :] + EXPERIMENTS[: turn % 8]
            parties = (order[:1], order) if turn % 2 == 0 else (order, order[:1])
            few, many = sorted((_candidates(url, names, seconds) for names in parties), key=len)
            alone.append(sum(few.values()))
            together.append(many)
    each = {name: sum(part[name] for part in together) for name in EXPERIMENTS}
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
    with service("--workers", str(WORKERS)) as url:
        push_runs(url, EXPERIMENTS)
        made = _race(url, EXPERIMENTS, 4, lambda made, _: max(made.values()) >= groups)
    off = farthest(made)
    return Row(
        f"8 experiments on {WORKERS} workers of one service",
        "each within 10 % of equal",
        f"{min(made.values()):,} to {max(made.values()):,} groups of {GROUP}: each within {off:.1%}",
        off <= 0.10,
        {"made": made},
    )


def _candidates(url: str, names: Sequence[str], seconds: float) -> dict[str, int]:
    """Candidates that each run receives within `seconds`, while every run always has work queued."""
    made = _race(url, names, 16, lambda _, counted: counted >= seconds)
    return {name: GROUP * groups for name, groups in made.items()}


def _race(
    url: str, names: Sequence[str], prompts: int, over: Callable[[Mapping[str, int], float], bool]
) -> dict[str, int]:
    with ExitStack() as stack:
        clients = {name: stack.enter_context(client_of(url)) for name in names}
        return race(clients, lambda name, root: request(name, prompts, GROUP, root=root), over)


def small_beside_big(trials: int) -> Row:
    """Count the chunks of a 96 × 48 request that run between a 24 × 1 request and its answer.

    Small requests come seldom enough that their run is never ahead of the big one, which would make it wait its turn.
    """
    waits = []
    with service() as url:
        push_runs(url, ["big", "small"])
        first, done = threading.Event(), threading.Event()

        def ask() -> None:
            with client_of(url) as client:
                while not done.is_set():
                    client.rollouts(request("big", 48, 96), on_group=lambda _: first.set())

        threading.Thread(target=ask, daemon=True).start()
        first.wait()
        with client_of(url) as client:
            for trial in range(trials):
                before = counters(url)["solrl_chunks_total"]
                client.rollouts(request("small", 1, 24, root=trial))
                waits.append(int(counters(url)["solrl_chunks_total"] - before) - 1)
                time.sleep(1.5)
        done.set()
    return Row(
        "small (24 × 1) request during a big (96 × 48) one",
        "waits for at most 2 chunks",
        f"at most {max(waits)} in {trials} trials, mean {sum(waits) / trials:.2f}",
        max(waits) <= 2,
        {"chunks_waited": waits},
    )


def starving(groups: int) -> Row:
    """Count the groups of a tenant with a new run in every request, and of a modest one until it has `groups`."""
    turn = count()

    def asked(tenant: str, root: int) -> RolloutRequest:
        run = NAMES[next(turn) % len(NAMES)] if tenant == "greedy" else "steady"
        return request(run, 4, GROUP, root=root)

    with ExitStack() as stack:
        file = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="solrl-starving-")), "tokens.json")
        tokens = {name: create_token(file, name, ("rollout", "push"), None)[0] for name in ("greedy", "modest")}
        url = stack.enter_context(service("--token-file", str(file)))
        clients = {name: stack.enter_context(client_of(url, token)) for name, token in tokens.items()}
        for run in NAMES:
            clients["greedy"].push(run, 0, None, MODEL, adapter_file(layout(), rank=4, seed=0))
        clients["modest"].push("steady", 0, None, MODEL, adapter_file(layout(), rank=4, seed=1))
        made = race(clients, asked, lambda made, _: made["modest"] >= groups)
    off = farthest(made)
    return Row(
        f"a tenant with {len(NAMES)} new run names beside another",
        "each tenant within 10 % of equal",
        f"{made['greedy']:,} and {made['modest']:,} groups of {GROUP}: each within {off:.1%}",
        off <= 0.10,
        {"made": made},
    )
