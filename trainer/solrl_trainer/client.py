"""The trainer's side of the rollout service's API."""

import base64
import hashlib
import time
from types import TracebackType
from typing import Any, Self

import httpx
from pydantic import ValidationError
from solrl_proto.adapters import ADAPTER_MEDIA_TYPE, DIGEST_HEADER, MODEL_PARAMETER, PARENT_PARAMETER, AdapterInfo
from solrl_proto.models import ModelInfo, ModelList
from solrl_proto.problems import Problem, ProblemError
from solrl_proto.rollouts import RolloutAnswer, RolloutRequest

_RETRIED = {429, 502, 503, 504}


class RolloutClient:
    """Asks a rollout service for candidates and pushes adapters to it.

    Requests that may be repeated (all of them: versions and seeds are exact) are retried on transport errors and
    on 429 and 502 to 504, with growing pauses, at most `retries` times.

    Args:
        url: base URL, e.g. http://gpu-node:8100.
        timeout: seconds to wait for an answer; exploring a large group takes a while.
        retries: how often a request is repeated.
    """

    def __init__(self, url: str, *, timeout: float = 1800.0, retries: int = 5, pause: float = 0.5) -> None:
        self.url = url.rstrip("/")
        self._retries = retries
        self._pause = pause
        self._http = httpx.Client(base_url=self.url, timeout=httpx.Timeout(timeout, connect=10.0))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def models(self) -> ModelList:
        """What the service hosts."""
        return ModelList.model_validate(self._ask("GET", "/v1/models").json())

    def model(self, name: str) -> ModelInfo:
        """One hosted model.

        Raises:
            ProblemError: it is not hosted; says what is.
        """
        hosted = {model.name: model for model in self.models().models}
        if name not in hosted:
            raise ProblemError(
                "model-not-found",
                404,
                "Model not hosted",
                f"the service at {self.url} does not host {name!r}",
                got=name,
                expected=sorted(hosted),
                action="start a service with --model, or choose a preset of a hosted model",
            )
        return hosted[name]

    def rollouts(self, request: RolloutRequest) -> RolloutAnswer:
        """Explore: candidates' seeds and proxy rewards."""
        body = request.model_dump_json(exclude_none=True).encode()
        headers = {"Content-Type": "application/json"}
        answer = self._ask("POST", "/v1/rollouts", content=body, headers=headers)
        return RolloutAnswer.model_validate_json(answer.content)

    def push(self, run: str, version: int, parent: int | None, model: str, body: bytes) -> AdapterInfo:
        """Store adapter bytes as `version` on top of `parent`. Pushing the same bytes again is a success."""
        digest = base64.b64encode(hashlib.sha256(body).digest()).decode()
        answer = self._ask(
            "PUT",
            f"/v1/runs/{run}/adapters/{version}",
            params={MODEL_PARAMETER: model} | ({} if parent is None else {PARENT_PARAMETER: parent}),
            content=body,
            headers={DIGEST_HEADER: f"sha-256=:{digest}:", "Content-Type": ADAPTER_MEDIA_TYPE},
        )
        return AdapterInfo.model_validate_json(answer.content)

    def _ask(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        for attempt in range(self._retries + 1):
            last = attempt == self._retries
            try:
                answer = self._http.request(method, path, **arguments)
            except httpx.TransportError as error:
                if last:
                    raise self._unreachable(error) from error
                time.sleep(self._pause * 2**attempt)
                continue
            if answer.is_success:
                return answer
            if answer.status_code not in _RETRIED or last:
                raise _problem_of(answer)
            time.sleep(float(answer.headers.get("Retry-After", self._pause * 2**attempt)))
        raise AssertionError("the loop returns or raises")

    def _unreachable(self, error: httpx.TransportError) -> ProblemError:
        return ProblemError(
            "service-unreachable",
            503,
            "Rollout service unreachable",
            f"no answer from {self.url} after {self._retries + 1} tries ({type(error).__name__}: {error})",
            where="--rollout-url",
            got=self.url,
            expected="the address of a running rollout service",
            action="start one with `solrl-rollout serve --model …`, or correct --rollout-url",
        )


def _problem_of(answer: httpx.Response) -> ProblemError:
    try:
        problem = Problem.model_validate_json(answer.content)
    except ValidationError:
        problem = Problem(
            type="urn:solrl:problem:unexpected-answer",
            title="Unexpected answer",
            status=answer.status_code,
            detail=f"{answer.request.method} {answer.request.url} answered {answer.status_code}: {answer.text[:200]}",
            action="check that the URL is a solrl rollout service",
        )
    return ProblemError(
        problem.kind,
        problem.status,
        problem.title,
        problem.detail,
        where=problem.where,
        got=problem.got,
        expected=problem.expected,
        action=problem.action,
    )
