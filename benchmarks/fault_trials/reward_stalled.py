"""A reward that does not return: its request fails, others are scored, the service is not live and ends when told."""

import signal
import time

from fault_trials.findings import Findings, Row, Tell
from fault_trials.reward_process import reward_service, scoring

_LIMIT = 1.0
_WAYS = ("asleep", "locked", "reading", "busy", "computing", "waiting")
_GOOD = "fault_trials.stuck_rewards:brightness"


def run(trials: int, tell: Tell, findings: Findings) -> None:
    """Ask a service of two rewards for scores, `trials` times; one of them does not return."""
    for trial in range(trials):
        way = _WAYS[trial % len(_WAYS)]
        stuck = f"fault_trials.stuck_rewards:{way}"
        with reward_service("--rewards", _GOOD, stuck, "--score-timeout", str(_LIMIT)) as service:
            began = time.monotonic()
            answer = service.ask(scoring(stuck))
            findings.most("longest until the request failed, s", round(time.monotonic() - began))
            findings.require(answer.status_code == 503 and "reward-stalled" in answer.text, way, answer.text[:200])
            for _ in range(3):
                findings.require(service.ask(scoring(_GOOD)).status_code == 200, way, "another reward does not go on")
                findings.require(service.ask(scoring(stuck)).status_code == 503, way, "it is asked again")
            live = service.http.get("/health/live").status_code
            findings.require(live == 503, way, f"live answers {live}")
            ready = service.http.get("/health/ready").json()
            findings.require(ready.get("rewards") == [_GOOD], way, f"ready answers {ready}")
            began = time.monotonic()
            service.program.send_signal(signal.SIGTERM)
            code = service.program.wait(80)
            findings.most("longest until it ended, s", round(time.monotonic() - began))
            findings.require(code == 0, way, f"ended with {code}")
            findings.require("Traceback" not in service.log, way, "a traceback in the log")
        findings.trials += 1
        findings.add(way)
        tell(way)


ROW = Row(
    "reward-stalled",
    "a reward sleeps, waits or computes without end: its requests fail after its limit, another reward of the service "
    "is scored, live is 503, ready names the other, and SIGTERM ends the service within 80 s",
    full=20,
    short=2,
    run=run,
)
