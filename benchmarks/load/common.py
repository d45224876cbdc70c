"""Helpers of the load tests: a service, runs with their own adapters, requests, races, and the service's counters."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from fault_trials.adapters import MODEL, layout
from prometheus_client.parser import text_string_to_metric_families
from solrl_client.rollouts import RolloutClient
from solrl_core.adapter import encode_adapter
from solrl_proto.rollouts import AdapterRef, Candidates, Plan, PromptItem, RewardSpec, RolloutRequest
from solrl_trainer.commands.local_service import rollout_service
from tests.support.adapters import random_adapter

GROUP = 24
"""Candidates of a group that is a chunk."""
_IN_FLIGHT = 3
"""Requests that each party of a race has at once."""
_WARM = 4
"""Groups that each party has before counting begins."""
Layout = dict[str, tuple[int, int]]


@contextmanager
def service(*flags: str) -> Iterator[str]:
    """Run a real service of the miniature on loopback; yields its URL."""
    with rollout_service(MODEL, Path("runs/load/service.log"), flags=flags) as url:
        yield url


def client_of(url: str, token: str | None = None) -> RolloutClient:
    """Client that keeps retrying while the queue is full."""
    return RolloutClient(url, token=token, patience=600)


def push_runs(url: str, names: list[str]) -> None:
    """Push a different adapter for each run."""
    targets = layout()
    with client_of(url) as client:
        for i, name in enumerate(names):
            client.push(name, 0, None, MODEL, adapter_file(targets, rank=4, seed=i))


def adapter_file(layout: Layout, *, rank: int, seed: int) -> bytes:
    """Encode an adapter with small random weights."""
    return encode_adapter(random_adapter(layout, seed, size=0.02, rank=rank))


def request(run: str | None, prompts: int, candidates: int, *, steps: int = 6, root: int = 0) -> RolloutRequest:
    """Request for some prompts with `candidates` each, at the service's fastest native precision."""
    return RolloutRequest(
        model=MODEL,
        adapter=None if run is None else AdapterRef(run=run, version=0),
        prompts=tuple(PromptItem(id=f"p{i}", text=f"{i % 4 + 1} red circles") for i in range(prompts)),
        candidates=Candidates(count=candidates, seed_root=root),
        plan=Plan(steps=steps),
        rewards=(RewardSpec(name="clipscore"),),
    )


def counters(url: str) -> dict[str, float]:
    """Read the service's metrics, each summed over its labels."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=60).text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def race(
    clients: Mapping[str, RolloutClient],
    asked: Callable[[str, int], RolloutRequest],
    over: Callable[[Mapping[str, int], float], bool],
) -> dict[str, int]:
    """Let several parties always have work queued; returns the groups of each, from when all are served.

    Args:
        clients: of each party.
        asked: a party's next request, with this root of its seeds.
        over: whether groups so far, and seconds of counting, are enough.
    """
    begun, made = dict.fromkeys(clients, 0), dict.fromkeys(clients, 0)
    counting, stop, lock, since = threading.Event(), threading.Event(), threading.Lock(), 0.0

    def ask(party: str, root: int) -> None:
        def on_group(_: object) -> None:
            nonlocal since
            with lock:
                if stop.is_set():
                    raise _Over
                begun[party] += 1
                if counting.is_set():
                    made[party] += 1
                    if over(made, time.monotonic() - since):
                        stop.set()
                elif min(begun.values()) >= _WARM:
                    since = time.monotonic()
                    counting.set()

        with suppress(_Over):
            while not stop.is_set():
                clients[party].rollouts(asked(party, root), on_group=on_group)
                root += _IN_FLIGHT

    threads = [threading.Thread(target=ask, args=(party, i)) for i in range(_IN_FLIGHT) for party in clients]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    return made


def farthest(made: Mapping[str, int]) -> float:
    """Largest relative difference from equal shares."""
    mean = sum(made.values()) / len(made)
    return max(abs(of_one - mean) / mean for of_one in made.values())


class _Over(Exception):  # noqa: N818
    """Ends a client's stream once enough was counted."""


def percentile(values: list[float], share: float) -> float:
    """Value below which a `share` (0 to 1) of the values lie."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def seconds_of(work: Any) -> float:
    """Seconds that a call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
