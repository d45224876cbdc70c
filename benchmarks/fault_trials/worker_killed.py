"""A worker process killed during an exploration: its chunks are made again with the same bits, and it serves again.

The worker dies right after a random event, in turn a chunk begun, a step and a chunk made. Another run asks for a few
candidates right afterwards. In every fourth trial the process that replaces the worker is killed, too, while it loads.
"""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from prometheus_client.parser import text_string_to_metric_families
from solrl_proto.rollouts import RolloutGroup

from fault_trials.adapters import layout, rollout_body
from fault_trials.findings import Findings, Row
from fault_trials.processes import RolloutService, rollout_service
from fault_trials.service_killed import SHAPES, Asked, Shape, require_whole

_WORKERS = 2
_AT_ONCE = 2
KINDS = ("begun", "step", "made")
"""Events of a worker."""
_LOADING = 4
"""Every this many trials, the process that replaces the killed one is killed, too."""
_PATIENCE = 600.0
_BESIDE = "beside"
"""Prompt of the other run."""


def run(trials: int, findings: Findings) -> None:
    """Run `trials` kills of one of two workers."""
    layout()  # fill the cache before threads start
    with two_workers() as service:
        kill_workers(service, partial(children_of, service.pid), trials, findings)


@contextmanager
def two_workers(*flags: str) -> Iterator[RolloutService]:
    """Run a service with two worker processes; it is killed at the end of the block."""
    with (
        patch.dict(os.environ, OMP_NUM_THREADS="1"),  # in every worker, as scores depend on it
        rollout_service("--workers", str(_WORKERS), *flags) as service,
    ):
        yield service


def kill_workers(service: RolloutService, processes: Callable[[], set[int]], trials: int, findings: Findings) -> None:
    """Kill workers of a running service.

    Args:
        service: a service with two workers.
        processes: returns the process ids of its workers.
        trials: number of kills.
        findings: takes counts and violated guarantees.
    """
    done = number = 0
    chance, whole, events = random.Random("worker 0"), {}, {}
    for shape in SHAPES:
        since = service.event_log.size
        whole[shape] = Asked(service, shape, f"whole-{shape.candidates}").finish()
        events[shape] = Counter(one["event"] for one in service.event_log.events(since))
    while done < trials:
        shape, number = SHAPES[done % len(SHAPES)], number + 1
        trial, since = f"worker-{number}", service.event_log.size
        restarts, failures = restarts_of(service), _failures(service)
        asked = Asked(service, shape, trial)
        kind = KINDS[done % len(KINDS)]
        last = wait_for(service, since, kind, chance.randrange(1, events[shape][kind]))
        time.sleep(chance.uniform(0, 0.01))
        late = asked.done
        os.kill(last["pid"], signal.SIGKILL)
        with ThreadPoolExecutor(1) as pool:
            beside = pool.submit(_ask_beside, service, chance.uniform(0, 0.1))
            twice = done % _LOADING == _LOADING - 1
            if twice:
                _kill_loading(processes, last["pid"], chance)
            groups = asked.finish()
        findings.require(beside.result() == 200, trial, f"the other run got {beside.result()}")
        if not all_serve(service, restarts + 1):
            findings.require(False, trial, "the worker does not serve again")
            return
        findings.require(restarts_of(service) == restarts + 1, trial, "more workers were loaded again than killed")
        noted = service.event_log.events(since)
        _let_all_make(service)
        if late:
            findings.add("killed too late, not counted")
            continue
        done += 1
        findings.require(_failures(service) == failures, trial, "a request failed")
        own = [one for one in noted if one.get("prompt") != _BESIDE]
        _judge(trial, shape, whole[shape], groups, asked, own, findings)
        _judge_beside(trial, noted, findings)
        findings.add(f"killed after {kind}")
        findings.add("killed again while it loaded", twice)
        findings.done(f"{trial}: {kind} of {last['prompt']}")


def wait_for(service: RolloutService, since: int, kind: str, count: int) -> dict[str, Any]:
    """Wait until the workers have recorded this many events of a kind; returns the last of them."""
    while True:
        events = [one for one in service.event_log.events(since) if one["event"] == kind]
        if len(events) >= count:
            return events[-1]
        time.sleep(0.02)


def _ask_beside(service: RolloutService, delay: float) -> int:
    """Ask for a few candidates of the base model; returns the status."""
    time.sleep(delay)
    return service.http.post("/v1/rollouts", json=rollout_body(prompt=_BESIDE)).status_code


def children_of(pid: int) -> set[int]:
    """The processes that any thread of a process has started."""
    files = Path(f"/proc/{pid}/task").glob("*/children")
    return {int(child) for file in files for child in file.read_text().split()}


def _kill_loading(processes: Callable[[], set[int]], dead: int, chance: random.Random) -> None:
    """Kill the process that replaces the dead one, at a random moment of its loading."""
    before = processes() - {dead}
    while not (fresh := processes() - before - {dead}):
        time.sleep(0.002)
    time.sleep(chance.uniform(0, 1))
    os.kill(fresh.pop(), signal.SIGKILL)


def all_serve(service: RolloutService, restarts: int) -> bool:
    """Whether all workers serve within some time, after at least this many restarts."""
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        ready = service.http.get("/health/ready")
        if ready.status_code == 200 and ready.json()["serving"] == _WORKERS and restarts_of(service) >= restarts:
            return True
        time.sleep(0.2)
    return False


def _let_all_make(service: RolloutService) -> None:
    """Have each worker finish a chunk: the service gives up one that dies five times without."""
    since = service.event_log.size
    while len({one["pid"] for one in service.event_log.events(since) if one["event"] == "made"}) < _WORKERS:
        service.http.post("/v1/rollouts", json=rollout_body(count=96, steps=1)).raise_for_status()


def restarts_of(service: RolloutService) -> int:
    """Times that a worker was loaded again."""
    return int(_sum(service, "solrl_worker_restarts_total"))


def _failures(service: RolloutService) -> int:
    return int(_sum(service, "solrl_http_requests_total", "status", "5"))


def _sum(service: RolloutService, name: str, label: str = "worker", begin: str = "") -> float:
    families = text_string_to_metric_families(service.http.get("/metrics").text)
    samples = [one for family in families for one in family.samples if one.name == name]
    return sum(one.value for one in samples if one.labels[label].startswith(begin))


def _judge(
    trial: str,
    shape: Shape,
    whole: Sequence[RolloutGroup],
    groups: Sequence[RolloutGroup],
    asked: Asked,
    events: list[dict[str, Any]],
    findings: Findings,
) -> None:
    begun, made = require_whole(trial, shape, whole, groups, asked, events, findings)
    again = begun.total() - shape.chunks
    findings.require(0 <= again <= _AT_ONCE and max(begun.values()) <= 2, trial, f"{again} chunks were begun again")
    findings.most("most chunks begun again", again)
    findings.most("most chunks made twice", made.total() - shape.chunks)


def _judge_beside(trial: str, events: Sequence[dict[str, Any]], findings: Findings) -> None:
    """Require that the other run waited for the chunk that its worker was making and at most one more."""
    own = [one for one in events if one.get("prompt") == _BESIDE]
    if any(one["event"] == "lost" for one in own):
        findings.add("another run's own chunk lost")
        return
    (queued,) = [one for one in own if one["event"] == "queued"]
    (begun,) = [one for one in own if one["event"] == "begun"]
    made = [one for one in events if one["event"] == "made" and one["pid"] == begun["pid"]]
    waited = sum(queued["at"] < one["at"] < begun["at"] for one in made)
    findings.require(waited <= 2, trial, f"another run waited for {waited} chunks")
    findings.most("most chunks that another run waited for", waited)


ROW = Row(
    "worker-killed",
    "one of two workers killed: the request finishes with the same bits, no seed lost or doubled, at most the two "
    "chunks it held made again; another run waits for the running chunk and at most one more; it serves again",
    full=200,
    short=1,
    run=run,
)
