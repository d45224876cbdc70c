"""A worker process stopped by SIGSTOP while twelve requests are served: all are answered, and two workers serve again.

The worker stops right after a random event, in turn a chunk begun, a step and a chunk made. In every third trial it
goes on after a moment; in the others it stays stopped.
"""

import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from fault_trials.adapters import rollout_body
from fault_trials.findings import Findings, Row
from fault_trials.processes import RolloutService
from fault_trials.worker_killed import KINDS, all_serve, restarts_of, two_workers, wait_for

_REQUESTS = 12
_LIVE = 5
"""Seconds within which a worker must respond."""
_BRIEF = 3
"""Every this many trials, the worker goes on by itself."""


def run(trials: int, findings: Findings) -> None:
    """Run `trials` stops of one of two workers."""
    chance = random.Random("stopped")
    with two_workers("--live-timeout", str(_LIVE)) as service, ThreadPoolExecutor(_REQUESTS) as pool:
        whole = [_ask(service, i)[0] for i in range(_REQUESTS)]
        while findings.trials < trials:
            trial, brief = f"stop-{findings.trials + 1}", findings.trials % _BRIEF == _BRIEF - 1
            kind, restarts, since = KINDS[findings.trials % len(KINDS)], restarts_of(service), service.event_log.size
            asked = [pool.submit(_ask, service, i) for i in range(_REQUESTS)]
            stopped = wait_for(service, since, kind, chance.randrange(1, _REQUESTS))["pid"]
            os.kill(stopped, signal.SIGSTOP)
            if brief:
                threading.Timer(chance.uniform(0.5, 2), os.kill, (stopped, signal.SIGCONT)).start()
            _judge(trial, whole, [one.result() for one in asked], findings)
            if not all_serve(service, restarts + (not brief)):
                findings.require(False, trial, "two workers do not serve again")
                return
            findings.add("goes on after a moment" if brief else f"stopped after {kind}")
            findings.add("workers replaced", restarts_of(service) - restarts)
            findings.done(trial)


def _ask(service: RolloutService, number: int) -> tuple[Any, float]:
    """The groups of a request, or why there are none, and how many seconds it took."""
    began = time.monotonic()
    try:
        answer = service.http.post("/v1/rollouts", json=rollout_body(prompt=f"p{number}", count=24, steps=4))
        groups = answer.json().get("groups", answer.text)
    except httpx.TimeoutException:
        groups = "no answer"
    return groups, time.monotonic() - began


def _judge(trial: str, whole: Sequence[Any], answers: Sequence[tuple[Any, float]], findings: Findings) -> None:
    for expected, (groups, _) in zip(whole, answers, strict=True):
        fault = groups if isinstance(groups, str) else "scores differ from the undisturbed answer's"
        findings.require(groups == expected, trial, fault)
    findings.most("longest request, s", round(max(seconds for _, seconds in answers)))


ROW = Row(
    "worker-stopped",
    f"one of two workers stopped by SIGSTOP, with --live-timeout {_LIVE}: twelve requests are answered with the same "
    "bits; a worker that stays stopped is replaced, and two workers serve again",
    full=20,
    short=2,
    run=run,
)
