"""Workers killed one at a time, every few seconds, also while they load: the service lives, and both serve again."""

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import httpx

from fault_trials.adapters import rollout_body
from fault_trials.findings import Findings, Row, Tell
from fault_trials.processes import RolloutService
from fault_trials.worker_killed import all_serve, children_of, two_workers

_CLIENTS = 4
_ALLOWED = ("200", "500 generation-failed")
"""Answers to requests; the second is for a chunk that two killed workers held."""


def run(trials: int, tell: Tell, findings: Findings) -> None:
    """Run `trials` kills of a worker. Between two of them, a few seconds pass and at least one chunk is made."""
    chance, stop, answers = random.Random("workers"), threading.Event(), Counter[str]()
    with two_workers() as service, ThreadPoolExecutor(_CLIENTS) as pool:
        clients = [pool.submit(_ask, service, f"p{i}", stop, answers) for i in range(_CLIENTS)]
        try:
            while findings.trials < trials:
                since = service.witness.size
                time.sleep(chance.uniform(1, 3))
                if not _is_made(service, since, clients):
                    break
                # Every other kill hits the process that was started last, which may be loading.
                alive = sorted(children_of(service.pid))
                killed = alive[-1] if findings.trials % 2 else chance.choice(alive)
                os.kill(killed, signal.SIGKILL)
                findings.trials += 1
                tell(f"killed {killed} of {alive}")
        finally:
            stop.set()
        for one in clients:
            one.result()
        lives = "200" in answers and not any(answer.endswith("Error") for answer in answers)
        findings.require(lives and all_serve(service, 1), "end", "two workers do not serve")
    for answer, count in answers.items():
        findings.add(f"answers {answer}", count)
        findings.require(answer in _ALLOWED, "load", f"{count} requests were answered {answer}")


def _is_made(service: RolloutService, since: int, clients: Sequence[Future[None]]) -> bool:
    """Wait until a chunk is made; returns whether one is, before the service ends."""
    while not any(one["event"] == "made" for one in service.witness.events(since)):
        if all(one.done() for one in clients):
            return False
        time.sleep(0.05)
    return True


def _ask(service: RolloutService, prompt: str, stop: threading.Event, answers: Counter[str]) -> None:
    """Ask for candidates one request after another, and count the answers."""
    while not stop.is_set():
        try:
            answer = service.http.post("/v1/rollouts", json=rollout_body(prompt=prompt, count=24, steps=4))
        except httpx.TransportError as error:
            answers[type(error).__name__] += 1
            return
        kind = "" if answer.status_code == 200 else " " + answer.json()["type"].rpartition(":")[2]
        answers[f"{answer.status_code}{kind}"] += 1


ROW = Row(
    "workers-killed",
    "two workers killed one at a time every few seconds under load, also while they load, with at least one chunk made "
    "between two kills: the service lives, only a chunk that two killed workers held fails, both serve again",
    full=20,
    short=2,
    run=run,
)
