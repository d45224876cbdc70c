"""Fuzzing of every route of a real service, with valid and invalid requests generated from its OpenAPI document.

    python benchmarks/fuzz_api.py [--examples 1000] [--seed 1] [--only /v1/rollouts] [--out docs/results]

Starts a service of a miniature with a token file and sends `examples` valid and `examples` invalid requests per route.
Exits with 1 if an answer is a 5xx or violates the OpenAPI document, or if too few requests were sent. If hypothesis
runs out of distinct requests, earlier ones are sent again. A route without parameters has no invalid requests.
"""

import argparse
import base64
import hashlib
import json
import logging
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import Case, GenerationMode
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.core.failures import FailureGroup
from solrl_core.adapter import encode_adapter
from solrl_core.families import load_backbone
from solrl_core.lora import adapter_layout
from solrl_http.tokens import create_token
from solrl_proto.adapters import ADAPTER_MEDIA_TYPE
from support.adapters import random_adapter
from support.doors import MODEL, Row, keep, service

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


@dataclass
class Tally:
    """Answers and faults of one route in one mode."""

    answers: Counter[int] = field(default_factory=Counter)
    different: set[int] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)

    @property
    def figures(self) -> dict[str, Any]:
        """Figures for the JSON."""
        answers = {str(status): count for status, count in sorted(self.answers.items())}
        return {"asked": self.answers.total(), "different": len(self.different), "answers": answers}


@contextmanager
def guarded() -> Iterator[tuple[str, str]]:
    """Run a service with tokens and small limits; yields its URL and a token with all permissions."""
    with tempfile.TemporaryDirectory(prefix="solrl-fuzz-") as folder:
        tokens = Path(folder, "tokens.json")
        secret, _ = create_token(tokens, "fuzz", ("rollout", "push", "admin"), None)
        with service("--token-file", str(tokens), "--queue-limit", "48", "--max-body-bytes", str(2**20)) as running:
            yield running.url, secret


@schemathesis.serializer(ADAPTER_MEDIA_TYPE)
def _bytes(_: Any, value: Any) -> bytes:
    return value if isinstance(value, bytes) else getattr(value, "data", None) or json.dumps(value).encode()


@dataclass(frozen=True)
class Existing:
    """An existing run, so that valid requests get further than a 404."""

    url: str
    headers: dict[str, str]
    body: bytes
    run: str = "fuzz"

    @property
    def digest(self) -> str:
        """Content-Digest header of the adapter."""
        return f"sha-256=:{base64.b64encode(hashlib.sha256(self.body).digest()).decode()}:"

    def push(self) -> None:
        """Push version 0, again if necessary."""
        path = f"{self.url}/v1/runs/{self.run}/adapters/0?model={MODEL}"
        headers = {"Content-Digest": self.digest, "Content-Type": ADAPTER_MEDIA_TYPE}
        httpx.put(path, content=self.body, headers=self.headers | headers).raise_for_status()

    def enter(self, case: Case) -> None:
        """Point a generated request at the existing run and model, and keep its work small."""
        if "run" in case.path_parameters:
            case.path_parameters["run"] = self.run
        if "version" in case.path_parameters:
            case.path_parameters["version"] = 0
        if case.method == "PUT" and case.path.endswith("{version}"):
            case.query = {"model": MODEL}
            case.headers["Content-Digest"] = self.digest
            case.body = self.body
        if case.method == "DELETE" and case.path.endswith("/adapters"):
            case.query = {"after": 0, "head": 0}
        if case.path.endswith("/rollouts") and isinstance(case.body, dict):
            adapter = {"run": self.run, "version": 0}
            plan = {"steps": 1, "guidance": case.body.get("plan", {}).get("guidance", 1.0)}
            prompts = {prompt["id"]: prompt for prompt in case.body["prompts"]}  # unique ids
            case.body |= {
                "model": MODEL,
                "rewards": [{"name": "clipscore"}],
                "adapter": adapter,
                "plan": plan,
                "prompts": list(prompts.values())[:4],
                "candidates": {"count": 2, "seed_root": 1},
            }


def small_adapter() -> bytes:
    """Encode an adapter of rank 1."""
    backbone = load_backbone(MODEL)
    layout = adapter_layout(backbone.transformer, backbone.lora_targets)
    return encode_adapter(random_adapter(layout, 0, rank=1, size=0.01))


def fuzz(operation: Any, mode: GenerationMode, examples: int, start: int, existing: Existing) -> Tally:
    """Send requests to one route. Faults are collected, not raised, so that one does not hide the next."""
    tally, chance = Tally(), random.Random(start)
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

    @seed(start)
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


def main() -> int:
    """Fuzz all routes, print and write the result."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--examples", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", help="only this path of the OpenAPI document; does not update the table")
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    asked = parser.parse_args()
    logging.getLogger("urllib3").setLevel(logging.ERROR)
    tallies: dict[str, Tally] = {}
    nothing_wrong: list[str] = []
    with guarded() as (url, secret):
        existing = Existing(url, {"Authorization": f"Bearer {secret}"}, small_adapter())
        schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
        for found in schema.get_all_operations():
            operation = found.ok()
            if asked.only not in (None, operation.path):
                continue
            for mode in GenerationMode:
                existing.push()
                name = f"{operation.method.upper()} {operation.path} {mode.value}"
                try:
                    tally = tallies[name] = fuzz(operation, mode, asked.examples, asked.seed, existing)
                except Unsatisfiable:
                    nothing_wrong.append(name)
                    print(f"{name:75}   none: no request to it is invalid")
                    continue
                print(f"{name:75} {tally.figures}", flush=True)
    faults = [f"{name}\n{fault}" for name, tally in tallies.items() for fault in tally.faults]
    for fault in faults:
        print(f"\n{fault}")
    row = _row(tallies, nothing_wrong, asked.examples)
    if asked.only is None:
        return keep(asked.out, "fuzz_api.py", row)
    print(f"\n{row.found}")
    return 0 if row.met else 1


def _row(tallies: dict[str, Tally], nothing_wrong: list[str], examples: int) -> Row:
    routes = {name.rpartition(" ")[0] for name in tallies}
    faults = sum(len(tally.faults) for tally in tallies.values())
    broken = sum(count for tally in tallies.values() for status, count in tally.answers.items() if status >= 500)
    fewest = min((tally.answers.total() for tally in tallies.values()), default=0)
    different = sum(len(tally.different) for tally in tallies.values())
    # Every route has valid requests.
    whole = tallies and all(f"{route} positive" in tallies for route in routes)
    return Row(
        f"≥ {examples:,} valid and as many invalid requests per route; no 5xx; answers conform to the OpenAPI document",
        f"{sum(tally.answers.total() for tally in tallies.values()):,} requests ({different:,} distinct) to "
        f"{len(routes)} routes, ≥ {fewest:,} valid and invalid each; {len(nothing_wrong)} routes have no invalid "
        f"requests; {broken} 5xx, {faults} faults",
        bool(whole) and not faults and not broken and fewest >= examples,
        {"kinds": {name: tally.figures for name, tally in tallies.items()}, "nothing_can_be_wrong": nothing_wrong},
    )


if __name__ == "__main__":
    sys.exit(main())
