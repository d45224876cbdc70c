"""Answers of a judge's endpoint that are expensive to parse: the request fails, and costs little."""

import json

from fault_trials.findings import Findings, Row, Tell
from fault_trials.judge_endpoint import JUDGE, judged_service
from fault_trials.reward_process import cost, scoring

_MIB = 2**20
_CHOICE = '{"message":{"content":"3"},"finish_reason":"stop"}'
_TOKEN = '{"token":"3","logprob":-0.1,"top_logprobs":[]}'


def run(trials: int, tell: Tell, findings: Findings) -> None:
    """Ask for a score `trials` times, with one expensive answer after the other."""
    answers = _answers()
    with judged_service() as (endpoint, service):
        endpoint.body = f'{{"choices":[{_CHOICE}]}}'.encode()
        findings.require(service.ask(scoring(JUDGE)).status_code == 200, "at first", "a good answer is not used")
        for trial in range(trials):
            what, endpoint.body = list(answers.items())[trial % len(answers)]
            body = scoring(JUDGE, height=33 + trial)
            answer, spent = cost(service.program.pid, service.url, lambda body=body: service.ask(body))
            findings.require(answer.status_code == 503, what, f"answered {answer.status_code} {answer.text[:200]}")
            spent.judge(what, findings)
            findings.trials += 1
            tell(what)


def _answers() -> dict[str, bytes]:
    """Expensive answers by their descriptions."""
    small = 200 * 1024  # within the limit of bytes
    return {
        "3 MiB of faulty choices": _filled('{"choices":[', "{}", 3 * _MIB),
        "15 MiB of faulty choices": _filled('{"choices":[', "{}", 15 * _MIB),
        "200 KiB of faulty choices": _filled('{"choices":[', "{}", small),
        "15 MiB of choices": _filled('{"choices":[', _CHOICE, 15 * _MIB),
        "200 KiB of choices": _filled('{"choices":[', _CHOICE, small),
        "15 MiB of log-probabilities": _log_probabilities(15 * _MIB),
        "15 MiB of lists": _filled('{"choices":[],"x":[', "[]", 15 * _MIB),
        "200 KiB of nested lists": b'{"choices":' + b"[" * small,
        "15 MiB of fields": ("{" + ",".join(f'"{i}":0' for i in range(_MIB)) + "}").encode(),
        "15 MiB of text": json.dumps({"choices": "x" * 15 * _MIB}).encode(),
    }


def _filled(begin: str, item: str, size: int) -> bytes:
    """A document whose last list has so many bytes of one item."""
    return (begin + ",".join([item] * (size // (len(item) + 1))) + "]}").encode()


def _log_probabilities(size: int) -> bytes:
    tokens = ",".join([_TOKEN] * (size // (len(_TOKEN) + 1)))
    choice = f'{_CHOICE[:-1]},"logprobs":{{"content":[{tokens}]}}}}'
    return f'{{"choices":[{choice}]}}'.encode()


ROW = Row(
    "judge-answers",
    "a judge's endpoint answers by up to 15 MiB of choices, log-probabilities, lists or text: the request fails; "
    "at most 300 MB more than idle, and the service says within 1 s that it is live",
    full=20,
    short=3,
    run=run,
)
