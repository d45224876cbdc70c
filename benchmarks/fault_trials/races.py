"""Concurrent pushes on one parent, through two replicas of the service: exactly one wins."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
from support.redis_server import dump, running_redis

from fault_trials.adapters import adapter_file, kind, put
from fault_trials.findings import Findings, Row, Tell
from fault_trials.processes import rollout_service

RACERS = 4
RUN = "race"
_LOST = {"version-conflict", "parent-conflict"}


def run(trials: int, tell: Tell, findings: Findings) -> None:
    """Run `trials` races, each on the head left by the previous one."""
    bodies = [adapter_file(seed) for seed in range(RACERS + 1)]
    with ExitStack() as stack:
        server = stack.enter_context(running_redis("everysec"))
        services = [stack.enter_context(rollout_service("--redis-url", server.url)) for _ in range(2)]
        clients = [stack.enter_context(httpx.Client(base_url=services[i % 2].url, timeout=300)) for i in range(RACERS)]
        pool = stack.enter_context(ThreadPoolExecutor(RACERS))
        put(clients[0], RUN, 0, bodies[-1]).raise_for_status()
        head = 0
        for trial in range(trials):
            # In every other race the pushes also differ in the number of the next version.
            versions = [head + 1 + (i % 2 if trial % 2 else 0) for i in range(RACERS)]
            answers = race(pool, clients, versions, head, bodies)
            head = judge(answers, versions, bodies, clients, findings, f"race {trial} on version {head}")
            findings.trials += 1
            tell(f"version {head} won")
        require_no_other_keys(server.url, clients[0], findings)


def require_no_other_keys(redis_url: str, client: httpx.Client, findings: Findings) -> None:
    """Require that Redis holds the keys of the run's versions and no others."""
    held = dump(redis_url)
    expected = 3 + len(client.get(f"/v1/runs/{RUN}/adapters").json()["versions"])
    findings.counted["keys at the end"] = len(held)
    findings.require(len(held) == expected, "at the end", f"{len(held)} keys, where {expected} belong to versions")


def race(
    pool: ThreadPoolExecutor, clients: list[httpx.Client], versions: list[int], head: int, bodies: list[bytes]
) -> list[httpx.Response]:
    """Push every body at the same moment, each by its own client; returns the answers."""
    barrier = threading.Barrier(RACERS)

    def push(i: int) -> httpx.Response:
        barrier.wait()
        return put(clients[i], RUN, versions[i], bodies[i], parent=head)

    return list(pool.map(push, range(RACERS)))


def judge(
    answers: list[httpx.Response],
    versions: list[int],
    bodies: list[bytes],
    clients: list[httpx.Client],
    findings: Findings,
    trial: str,
) -> int:
    """Check that one push won and that every client finds it; returns the new head."""
    outcomes = Counter("won" if answer.status_code == 201 else kind(answer) for answer in answers)
    for outcome, count in outcomes.items():
        findings.add(outcome, count)
    findings.require(outcomes["won"] == 1, trial, f"{outcomes['won']} winners")
    findings.require(set(outcomes) <= {"won", *_LOST}, trial, f"answered {dict(outcomes)}")
    listed = clients[0].get(f"/v1/runs/{RUN}/adapters").json()
    winners = [i for i, answer in enumerate(answers) if answer.status_code == 201]
    for i in winners:
        findings.require(listed["head"] == versions[i], trial, f"the head is {listed['head']}, {versions[i]} won")
        for client in clients[:2]:
            stored = client.get(f"/v1/runs/{RUN}/adapters/{versions[i]}/weights").content
            findings.require(stored == bodies[i], trial, "the head's bytes are not the winner's")
    head: int = listed["head"]
    return head


ROW = Row(
    "races",
    "concurrent pushes on one parent: exactly one winner",
    full=1000,
    short=4,
    run=run,
)
