"""A reward that raises what ends a program, or returns no scores: its request fails, and the service goes on."""

from fault_trials.findings import Findings, Row, Tell
from fault_trials.reward_process import reward_service, scoring

_GOOD = "fault_trials.stuck_rewards:brightness"
_WAYS = ("interrupted", "exits", "base", "closes", "complex_scores", "escapes")


def run(trials: int, tell: Tell, findings: Findings) -> None:
    """Ask one service for scores of rewards that fail in various ways, `trials` times."""
    failing = [f"fault_trials.raising_rewards:{way}" for way in _WAYS]
    with reward_service("--rewards", _GOOD, *failing) as service:
        for trial in range(trials):
            way, reward = _WAYS[trial % len(_WAYS)], failing[trial % len(_WAYS)]
            answer = service.ask(scoring(reward, count=1 + trial % 4))
            failed = answer.status_code == 500 and "reward-failed" in answer.text
            findings.require(failed, way, f"answered {answer.status_code}: {answer.text[:200]}")
            if failed:
                findings.require(answer.json()["detail"].isprintable(), way, "control characters in the problem")
            findings.require(service.ask(scoring(_GOOD)).status_code == 200, way, "another reward does not go on")
            live = service.http.get("/health/live").status_code
            findings.require(live == 200, way, f"live answers {live}")
            findings.require("\x1b" not in service.log, way, "control characters in the log")
            findings.trials += 1
            findings.add(way)
            tell(way)


ROW = Row(
    "reward-raises",
    "a reward raises KeyboardInterrupt, SystemExit or BaseException, returns complex numbers, or fails with escape "
    "sequences: its request is answered 500 without them, another reward of the service is scored, and it is live",
    full=20,
    short=6,
    run=run,
)
