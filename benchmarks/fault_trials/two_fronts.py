"""Two services on one Redis: pushes race through both, then each sees at once what happened at the other."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
from tests.support.redis_server import dump, running_redis

from fault_trials.adapters import adapter_file, kind, put, rollout_body
from fault_trials.findings import Findings, Row
from fault_trials.services import rollout_service

RACERS = 4
RUN = "race"
_LOST = {"version-conflict", "parent-conflict"}
_BACK, _DELETED = 3, 10
"""Going back after every third race, deleting the run after every tenth."""

Scores = dict[bytes, list[float]]
"""Adapter file → scores of one group under it, the same at both fronts on a CPU."""


def run(trials: int, findings: Findings) -> None:
    """Run `trials` races. After each, the front that did not take the winner explores under it."""
    # Two sets in turn, so that a version that returns with its number has other content than before.
    sets = [[adapter_file(10 * i + seed) for seed in range(RACERS)] for i in range(2)]
    first = adapter_file(100)
    scores: Scores = {}
    with ExitStack() as stack:
        server = stack.enter_context(running_redis("everysec"))
        services = [stack.enter_context(rollout_service("--redis-url", server.url)) for _ in range(2)]
        clients = [stack.enter_context(httpx.Client(base_url=services[i % 2].url, timeout=300)) for i in range(RACERS)]
        fronts = clients[:2]
        pool = stack.enter_context(ThreadPoolExecutor(RACERS))
        head = _begin(clients[0], first)
        for trial in range(trials):
            name, bodies = f"race {trial} on version {head}", sets[trial % 2]
            # In every other race the pushes also differ in the number of the next version.
            versions = [head + 1 + (i % 2 if trial % 2 else 0) for i in range(RACERS)]
            before, (head, winner) = head, _race(pool, clients, versions, head, bodies, findings, name)
            if winner is not None:
                _explore(clients[winner], fronts[1 - winner % 2], head, bodies[winner], scores, findings, name)
            if trial % _DELETED == _DELETED - 1:
                front, other = fronts[:: 1 if trial // _DELETED % 2 else -1]
                _delete(front, other, head, findings, name)
                head = _begin(other, first)
            elif trial % _BACK == _BACK - 1:
                front, other = fronts[:: 1 if trial % 2 else -1]
                head = _go_back(front, other, before, head, findings, name)
            findings.done(f"version {head} is the head")
        held, versions = dump(server.url), clients[0].get(f"/v1/runs/{RUN}/adapters").json()["versions"]
        findings.counted["keys at the end"] = len(held)
        # The tenant's runs and their bytes, the run's versions, and a blob of each.
        findings.require(len(held) == 3 + len(versions), "at the end", f"{sorted(held)} for {len(versions)} versions")


def _race(
    pool: ThreadPoolExecutor,
    clients: list[httpx.Client],
    versions: list[int],
    head: int,
    bodies: list[bytes],
    findings: Findings,
    trial: str,
) -> tuple[int, int | None]:
    """Push every body at the same moment, each by its own client; returns the new head, and whose push won."""
    barrier = threading.Barrier(RACERS)

    def push(i: int) -> httpx.Response:
        barrier.wait()
        return put(clients[i], RUN, versions[i], bodies[i], parent=head)

    answers = list(pool.map(push, range(RACERS)))
    outcomes = Counter("won" if answer.status_code == 201 else kind(answer) for answer in answers)
    for outcome, count in outcomes.items():
        findings.add(outcome, count)
    findings.require(outcomes["won"] == 1, trial, f"{outcomes['won']} winners")
    findings.require(set(outcomes) <= {"won", *_LOST}, trial, f"answered {dict(outcomes)}")
    now: int = clients[0].get(f"/v1/runs/{RUN}/adapters").json()["head"]
    winner = next((i for i, answer in enumerate(answers) if answer.status_code == 201), None)
    if winner is not None:
        findings.require(now == versions[winner], trial, f"the head is {now}, {versions[winner]} won")
        for client in clients[:2]:
            stored = client.get(f"/v1/runs/{RUN}/adapters/{versions[winner]}/weights").content
            findings.require(stored == bodies[winner], trial, "the head's bytes are not the winner's")
    return now, winner


def _begin(front: httpx.Client, body: bytes) -> int:
    put(front, RUN, 0, body).raise_for_status()
    return 0


def _explore(
    taker: httpx.Client,
    other: httpx.Client,
    version: int,
    body: bytes,
    scores: Scores,
    findings: Findings,
    trial: str,
) -> None:
    """Explore under a version at the front that did not take it, and compare with the one that did."""
    request = rollout_body(run=(RUN, version), count=2, steps=1)
    if body not in scores:
        scores[body] = _scores(taker.post("/v1/rollouts", json=request))
    answer = other.post("/v1/rollouts", json=request)
    findings.require(answer.is_success, trial, f"the other front answered {answer.status_code}")
    if answer.is_success:
        findings.add("explored at the other front")
        findings.require(_scores(answer) == scores[body], trial, "the other front served other weights")


def _scores(answer: httpx.Response) -> list[float]:
    answer.raise_for_status()
    (group,) = answer.json()["groups"]
    found: list[float] = group["scores"]
    return found


def _go_back(front: httpx.Client, other: httpx.Client, version: int, head: int, findings: Findings, trial: str) -> int:
    """Make `version` the head again at one front; the other must refuse the later one."""
    front.delete(f"/v1/runs/{RUN}/adapters", params={"after": version, "head": head}).raise_for_status()
    _require_gone(other, head, "version-not-found", findings, trial)
    now: int = other.get(f"/v1/runs/{RUN}/adapters").json()["head"]
    findings.require(now == version, trial, f"the other front's head is {now} after going back to {version}")
    findings.add("went back")
    return version


def _delete(front: httpx.Client, other: httpx.Client, head: int, findings: Findings, trial: str) -> None:
    """Delete the run at one front; the other must not know it."""
    front.delete(f"/v1/runs/{RUN}").raise_for_status()
    _require_gone(other, head, "run-not-found", findings, trial)
    findings.add("deleted")


def _require_gone(front: httpx.Client, version: int, expected: str, findings: Findings, trial: str) -> None:
    answer = front.post("/v1/rollouts", json=rollout_body(run=(RUN, version), count=2, steps=1))
    found = str(answer.status_code) if answer.is_success else kind(answer)
    findings.require(found == expected, trial, f"the other front answered {found}, expected {expected}")


ROW = Row(
    "two-fronts",
    "pushes race through two services on one Redis: exactly one winner, and each service sees at once what the other "
    "stored, deleted or went back from",
    full=1000,
    short=4,
    run=run,
)
