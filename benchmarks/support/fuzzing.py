"""Fuzzing of the routes of a running service."""

import json
import logging
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx
import schemathesis
from fault_trials.adapters import MODEL, layout, put
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import Case, GenerationMode
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.core.failures import FailureGroup
from solrl_core.adapter import encode_adapter
from solrl_proto.adapters import ADAPTER_MEDIA_TYPE
from tests.support.adapters import content_digest, random_adapter

CHECKED = [
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "missing_required_header",
    "unsupported_method",
    "allow_header_conformance",
]
RUN = "fuzz"


@dataclass
class Tally:
    """Answers and faults of one route in one mode."""

    answers: Counter[int] = field(default_factory=Counter)
    different: set[int] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)

    @property
    def figures(self) -> dict[str, Any]:
        answers = {str(status): count for status, count in sorted(self.answers.items())}
        return {"asked": self.answers.total(), "different": len(self.different), "answers": answers}


@schemathesis.serializer(ADAPTER_MEDIA_TYPE)
def _bytes(_: Any, value: Any) -> bytes:
    return value if isinstance(value, bytes) else getattr(value, "data", None) or json.dumps(value).encode()


class Existing:
    """An existing run with an adapter of rank 1, so that valid requests get further than a 404."""

    def __init__(self, url: str, secret: str) -> None:
        self.headers = {"Authorization": f"Bearer {secret}"}
        self._http = httpx.Client(base_url=url, headers=self.headers)
        self._body = encode_adapter(random_adapter(layout(), 0, size=0.01, rank=1))

    def push(self) -> None:
        """Push version 0, again if necessary."""
        put(self._http, RUN, 0, self._body).raise_for_status()

    def enter(self, case: Case) -> None:
        """Point a generated request at the existing run and model, and keep its work small."""
        if "run" in case.path_parameters:
            case.path_parameters["run"] = RUN
        if "version" in case.path_parameters:
            case.path_parameters["version"] = 0
        if case.method == "PUT" and case.path.endswith("{version}"):
            case.query = {"model": MODEL}
            case.headers["Content-Digest"] = content_digest(self._body)
            case.body = self._body
        if case.method == "DELETE" and case.path.endswith("/adapters"):
            case.query = {"after": 0, "head": 0}
        if case.path.endswith("/rollouts") and isinstance(case.body, dict):
            prompts = {prompt["id"]: prompt for prompt in case.body["prompts"]}  # unique ids
            case.body |= {
                "model": MODEL,
                "rewards": [{"name": "clipscore"}],
                "adapter": {"run": RUN, "version": 0},
                "plan": {"steps": 1, "guidance": case.body.get("plan", {}).get("guidance", 1.0)},
                "prompts": list(prompts.values())[:4],
                "candidates": {"count": 2, "seed_root": 1},
            }


def fuzz(operation: Any, mode: GenerationMode, examples: int, existing: Existing) -> Tally:
    """Send requests to one route. Faults are collected, not raised, so that one does not hide the next."""
    tally, chance = Tally(), random.Random(1)
    load_all_checks()
    # Only for negative mode: schemathesis takes the fields replaced by `enter` for invalid data, too.
    positive = mode is GenerationMode.POSITIVE
    checks = CHECKS.get_by_names([name for name in CHECKED if not (positive and name == "negative_data_rejection")])

    def ask(case: Case) -> None:
        # Do not add a token to a request that omits it on purpose.
        headers = {} if not positive and "Authorization" not in case.headers else existing.headers
        response = case.call(headers=headers)
        tally.answers[response.status_code] += 1
        sent = response.request
        told = sorted((name, value) for name, value in sent.headers.items() if name != "X-Schemathesis-TestCaseId")
        tally.different.add(hash((sent.url, str(sent.body), str(told))))
        try:
            case.validate_response(response, checks=checks, headers=headers)
        except FailureGroup as group:
            if len(tally.faults) < 5:
                tally.faults.append(f"{case.as_curl_command()[:1500]}\n{response.status_code} {group.exceptions}")

    asked: list[Case] = []

    @seed(1)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def generated(case: Case) -> None:
        if positive and chance.random() < 0.5:
            existing.enter(case)
        ask(case)
        asked.append(case)

    generated()
    # hypothesis stops early when there are no more distinct requests.
    for i in range(examples - len(asked)):
        ask(asked[i % len(asked)])
    return tally


def fuzz_routes(url: str, secret: str, examples: int) -> tuple[dict[str, Tally], list[str]]:
    """Fuzz all routes: the tally of each route and mode, and the names of those to which no request is invalid.

    Args:
        url: the service.
        secret: a token with all permissions.
        examples: requests to each route in each mode.
    """
    logging.getLogger("urllib3").setLevel(logging.ERROR)
    existing = Existing(url, secret)
    tallies: dict[str, Tally] = {}
    nothing_wrong: list[str] = []
    for found in schemathesis.openapi.from_url(f"{url}/openapi.json").get_all_operations():
        operation = found.ok()
        for mode in GenerationMode:
            existing.push()
            name = f"{operation.method.upper()} {operation.path} {mode.value}"
            try:
                tallies[name] = fuzz(operation, mode, examples, existing)
            except Unsatisfiable:
                nothing_wrong.append(name)
            else:
                print(f"{name:75} {tallies[name].figures}", flush=True)
    return tallies, nothing_wrong
