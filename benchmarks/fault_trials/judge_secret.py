"""A judge's endpoint that repeats the API key in what it answers: neither the client nor the log sees the key."""

import json
import random
import secrets

from fault_trials.findings import Findings, Row, Tell
from fault_trials.judge_endpoint import JUDGE, judged_service
from fault_trials.reward_process import scoring

_STATUSES = (401, 403, 400, 429, 500, 200)
_FORMS = ("message", "text", "answer", "html")


def run(trials: int, tell: Tell, findings: Findings) -> None:
    """Ask an endpoint that repeats the key, `trials` times, in statuses, forms and places that vary."""
    chance, key = random.Random(1), f"sk-{secrets.token_urlsafe(30)}"
    with judged_service(SOLRL_JUDGE_TOKEN=key) as (endpoint, service):
        endpoint.repeats = True
        for trial in range(trials):
            form, endpoint.status = _FORMS[trial % len(_FORMS)], _STATUSES[trial % len(_STATUSES)]
            endpoint.body = _body(form, "x" * chance.randrange(500))
            answer = service.ask(scoring(JUDGE, height=8 + trial))
            what = f"{endpoint.status} with the key in its {form}"
            findings.require(answer.status_code in (500, 503), what, f"answered {answer.status_code}")
            for place, text in (("answer", answer.text), ("log", service.log)):
                # Half of it: a text may be shortened within the key.
                findings.require(key[:20] not in text, what, f"the key is in the {place}")
            findings.trials += 1
            findings.add(f"answered {answer.status_code}")
            tell(what)


def _body(form: str, before: str) -> bytes:
    """A body with the key after some text."""
    said = f"{before} Authorization: {{key}}"
    documents = {
        "message": json.dumps({"error": {"message": said}}),
        "answer": json.dumps({"choices": [{"message": {"content": said}, "finish_reason": "stop"}]}),
        "text": said,
        "html": f"<html>{said}</html>",
    }
    return documents[form].encode()


ROW = Row(
    "judge-secret",
    "a judge's endpoint repeats the API key in refusals and answers: neither the client's answer nor the log has it",
    full=20,
    short=8,
    run=run,
)
