"""Clients disconnect while their work runs or waits: it stops within a step and does not delay the next request.

The trials count the engine's actions instead of measuring time: steps and chunks begun after the disconnect was
noticed, and chunks finished for clients that had left.
"""

import json
import random
import socket
import time
from typing import Any

from solrl_proto.rollouts import STREAM_MEDIA_TYPE

from fault_trials.adapters import rollout_body
from fault_trials.findings import Findings, Row
from fault_trials.processes import RolloutService, rollout_service

_CROWD = 20
_STEPS = 40


def run(trials: int, findings: Findings) -> None:
    """Run `trials` disconnects: half of them one at a time, the others in crowds, whose first request is running."""
    chance = random.Random(0)
    with rollout_service() as service:
        alone = trials - trials // 2
        sizes = [1] * alone + [_CROWD] * (trials // 2 // _CROWD)
        sizes += [rest] if (rest := trials // 2 % _CROWD) else []
        for number, size in enumerate(sizes):
            _trial(f"trial-{number}", size, service, chance, findings)
            for _ in range(size):
                findings.done(f"{size} at once")
        answered = service.http.post("/v1/rollouts", json=rollout_body(prompt="last", count=2, steps=1))
        findings.require(answered.status_code == 200, "at the end", answered.text[:200])


def _trial(name: str, size: int, service: RolloutService, chance: random.Random, findings: Findings) -> None:
    since = service.event_log.size
    names = [f"{name}-{i}" for i in range(size)]
    asked = [_ask(service, one, streaming=chance.random() < 0.5) for one in names]
    wanted = chance.randrange(1, _STEPS // 4)
    while sum(one["event"] == "step" for one in service.event_log.events(since)) < wanted:
        time.sleep(0.002)
    left = time.monotonic()
    for one in asked:
        one.close()
    answer = service.http.post("/v1/rollouts", json=rollout_body(prompt=f"{name}-next", count=2, steps=1))
    findings.require(answer.status_code == 200, name, answer.text[:200])
    while len(cancelled := _cancelled(service.event_log.events(since), names)) < size:
        time.sleep(0.002)
    _judge(name, service.event_log.events(since), names, cancelled, left, findings)


def _ask(service: RolloutService, name: str, *, streaming: bool) -> socket.socket:
    """Send a request for two chunks with many steps, on its own connection."""
    body = json.dumps(rollout_body(prompt=name, count=48, steps=_STEPS)).encode()
    accept = STREAM_MEDIA_TYPE if streaming else "application/json"
    head = (
        f"POST /v1/rollouts HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: {accept}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    one = socket.create_connection(("127.0.0.1", service.port))
    one.sendall(head.encode() + body)
    return one


def _cancelled(events: list[dict[str, Any]], names: list[str]) -> dict[str, float]:
    """Times at which the engine cancelled the jobs of clients that left, by job."""
    own = {one["job"] for one in events if one["event"] in ("begun", "step") and one["prompt"] not in names}
    return {one["job"]: one["at"] for one in events if one["event"] == "cancelled" and one["job"] not in own}


def _judge(
    trial: str,
    events: list[dict[str, Any]],
    names: list[str],
    cancelled: dict[str, float],
    left: float,
    findings: Findings,
) -> None:
    theirs = [one for one in events if one.get("prompt") in names]
    steps = [one for one in theirs if one["event"] == "step"]
    late = sum(one["at"] > cancelled[one["job"]] for one in steps if one["job"] in cancelled)
    findings.require(late <= 1, trial, f"{late} steps were begun after the hang-up was noticed")
    findings.most("most steps begun after the hang-up was noticed", late)
    findings.most("most steps begun after the hang-up", sum(one["at"] > left for one in steps))
    made = sum(one["event"] == "made" for one in theirs)
    findings.require(made == 0, trial, f"{made} chunks were made for those who had left")
    findings.most("chunks made for those who had left", made)
    begun = [one for one in theirs if one["event"] == "begun" and one["at"] > min(cancelled.values())]
    findings.require(len(begun) <= 1, trial, f"{len(begun)} chunks were begun after the hang-up was noticed")
    findings.most("most chunks begun after it", len(begun))
    findings.add("at once" if len(names) > 1 else "one at a time", len(names))


ROW = Row(
    "abandoned",
    "abandoned requests: the next is answered within one batch; work stops within one step",
    full=200,
    short=4,
    run=run,
)
