"""The trainer's side of the rollout service's API."""

import base64
import copy
import hashlib
import os
import time
from collections.abc import Callable, Collection
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
from pydantic import TypeAdapter, ValidationError
from solrl_proto.adapters import (
    ADAPTER_MEDIA_TYPE,
    AFTER_PARAMETER,
    DIGEST_HEADER,
    HEAD_PARAMETER,
    MODEL_PARAMETER,
    PARENT_PARAMETER,
    AdapterInfo,
    AdapterList,
)
from solrl_proto.models import ModelInfo, ModelList
from solrl_proto.problems import Problem, ProblemError, ProblemKind
from solrl_proto.rollouts import (
    STREAM_MEDIA_TYPE,
    Candidates,
    EndLine,
    ErrorLine,
    GroupLine,
    RolloutAnswer,
    RolloutGroup,
    RolloutRequest,
    RolloutTimings,
    StreamLine,
)
from solrl_proto.status import IterationReport

_RETRIED = {429, 502, 503, 504}
_LONGEST_PAUSE = 10.0
_LINE: TypeAdapter[StreamLine] = TypeAdapter(StreamLine)

Value = TypeVar("Value")
Restore = Callable[[Problem], bool]
"""Removes the cause of a refusal, if it can; then the request is repeated."""


def rollout_token() -> str | None:
    """The bearer token for the service, from SOLRL_TOKEN or the file that SOLRL_TOKEN_PATH names.

    Never from the command line, which others can read.

    Raises:
        OSError: the file cannot be read.
    """
    path = os.environ.get("SOLRL_TOKEN_PATH")
    return Path(path).read_text().strip() if path else os.environ.get("SOLRL_TOKEN") or None


class RolloutClient:
    """Asks a rollout service for candidates and pushes adapters to it.

    Requests may be repeated (all of them: versions and seeds are exact) and are, on transport errors and on 429 and
    502 to 504, with growing pauses, until `patience` seconds went by without an answer.

    Args:
        url: base URL, e.g. http://gpu-node:8100.
        token: bearer token, where the service asks for one.
        timeout: seconds to wait for a sign of life of a request; exploring a large group takes a while.
        patience: seconds to go on trying.
        pause: seconds before the first repetition.
        awaited: kinds of refusal that pass by themselves, and are retried too.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeout: float = 1800.0,
        patience: float = 15.0,
        pause: float = 0.5,
        awaited: Collection[str] = (),
    ) -> None:
        self.url = url.rstrip("/")
        self._patience = patience
        self._pause = pause
        self._awaited = frozenset(awaited)
        headers = {"Authorization": f"Bearer {token}"} if token else None
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=httpx.Timeout(timeout, connect=10.0))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def with_patience(self, seconds: float) -> "RolloutClient":
        """A client with another patience that shares this one's connections, and is closed with it."""
        client = copy.copy(self)
        client._patience = seconds
        return client

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
                ProblemKind.MODEL_NOT_FOUND,
                f"the service at {self.url} does not host {name!r}",
                got=name,
                expected=sorted(hosted),
                action="start a service with --model, or choose a preset of a hosted model",
            )
        return hosted[name]

    def adapters(self, run: str) -> AdapterList | None:
        """What the service holds of a run; None if it knows no such run."""
        try:
            return AdapterList.model_validate_json(self._ask("GET", f"/v1/runs/{run}/adapters").content)
        except ProblemError as error:
            if error.problem.kind != ProblemKind.RUN_NOT_FOUND:
                raise
            return None

    def rollouts(
        self,
        request: RolloutRequest,
        *,
        on_group: Callable[[RolloutGroup], None] = lambda group: None,
        restore: Restore | None = None,
    ) -> RolloutAnswer:
        """Explore: candidates' seeds and proxy rewards.

        The answer is streamed. Where it is cut short, only the groups that are missing are asked for again.

        Args:
            request: what to ask.
            on_group: gets each group as it comes, once.
            restore: see `Restore`.

        Raises:
            ProblemError: refused, unreachable, or its parts were made in different ways.
        """
        made: dict[str, GroupLine] = {}

        def attempt() -> RolloutTimings:
            return self._stream(_remaining(request, made.keys()), made, on_group)

        seconds = self._patiently(attempt, restore=restore, progress=lambda: len(made))
        lines = [made[prompt.id] for prompt in request.prompts]
        served = lines[0].served
        other = next((line.served for line in lines if line.served != served), None)
        if other is not None:
            raise ProblemError(
                ProblemKind.SERVED_DIFFERENTLY,
                f"the service at {self.url} made one part of an answer in another way than the rest",
                got=other.model_dump(mode="json"),
                expected=served.model_dump(mode="json"),
                action="it was restarted with other settings, or replicas differ: make them equal, then resume",
            )
        return RolloutAnswer(**dict(served), groups=tuple(line.group for line in lines), seconds=seconds)

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

    def tell(self, run: str, report: IterationReport) -> None:
        """Tell what an iteration came to."""
        body = report.model_dump_json(exclude_none=True).encode()
        self._ask("POST", f"/v1/runs/{run}/iterations", content=body, headers={"Content-Type": "application/json"})

    def rewind(self, run: str, version: int, head: int) -> None:
        """Make a version that the service holds the run's head again, instead of `head`; those after it are deleted."""
        self._ask("DELETE", f"/v1/runs/{run}/adapters", params={AFTER_PARAMETER: version, HEAD_PARAMETER: head})

    def delete(self, run: str) -> None:
        """Delete all versions of a run, if there are any."""
        try:
            self._ask("DELETE", f"/v1/runs/{run}")
        except ProblemError as error:
            if (
                error.problem.kind != ProblemKind.RUN_NOT_FOUND
            ):  # as a second try finds it, when the first one's answer was lost
                raise

    def _stream(
        self, request: RolloutRequest, made: dict[str, GroupLine], on_group: Callable[[RolloutGroup], None]
    ) -> RolloutTimings:
        """Put each line of one try into `made`."""
        body = request.model_dump_json(exclude_none=True).encode()
        headers = {"Content-Type": "application/json", "Accept": STREAM_MEDIA_TYPE}
        asked = {prompt.id for prompt in request.prompts}
        with self._http.stream("POST", "/v1/rollouts", content=body, headers=headers) as answer:
            if not answer.is_success:
                answer.read()
                raise _refusal(answer)
            for text in answer.iter_lines():
                line = _LINE.validate_json(text)
                if isinstance(line, ErrorLine):
                    raise RefusedError(line.problem)
                if isinstance(line, EndLine):
                    if asked:
                        raise _unexpected(answer, f"an end without the groups {sorted(asked)}")
                    return line.seconds
                if line.group.prompt_id not in asked:
                    raise _unexpected(answer, f"a group {line.group.prompt_id!r} that was not asked for")
                _check_served(request, line, self.url)
                asked.remove(line.group.prompt_id)
                made[line.group.prompt_id] = line
                on_group(line.group)
        raise httpx.RemoteProtocolError("the stream ended without its end line")

    def _ask(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        def attempt() -> httpx.Response:
            answer = self._http.request(method, path, **arguments)
            if not answer.is_success:
                raise _refusal(answer)
            return answer

        return self._patiently(attempt)

    def _patiently(
        self,
        attempt: Callable[[], Value],
        *,
        restore: Restore | None = None,
        progress: Callable[[], int] = lambda: 0,
    ) -> Value:
        """The result of `attempt`, which is made again while it fails in ways that pass; progress renews patience."""
        began, tries, reached = time.monotonic(), 1, progress()
        while True:
            failure: ProblemError
            pause = min(self._pause * 2 ** (tries - 1), _LONGEST_PAUSE)
            try:
                return attempt()
            except httpx.TransportError as error:
                failure = self._unreachable(error, tries)
            except RefusedError as error:
                if restore is not None and restore(error.problem):
                    continue
                if error.problem.status not in _RETRIED and error.problem.kind not in self._awaited:
                    raise
                failure, pause = error, error.retry_after or pause
            if progress() > reached:
                began, tries, reached = time.monotonic(), 1, progress()
            if time.monotonic() + pause - began > self._patience:
                raise failure
            time.sleep(pause)
            tries += 1

    def _unreachable(self, error: httpx.TransportError, tries: int) -> ProblemError:
        return ProblemError(
            ProblemKind.SERVICE_UNREACHABLE,
            f"no answer from {self.url} after {tries} tries ({type(error).__name__}: {error})",
            where="--rollout-url",
            got=self.url,
            expected="the address of a running rollout service",
            action="start one with `solrl-rollout serve --model …`, or correct --rollout-url",
        )


class RefusedError(ProblemError):
    """The service's own problem; `retry_after` seconds from now it may be gone."""

    def __init__(self, problem: Problem, retry_after: float | None = None) -> None:
        Exception.__init__(self, str(problem))
        self.problem = problem
        self.retry_after = retry_after


def _refusal(answer: httpx.Response) -> RefusedError:
    try:
        problem = Problem.model_validate_json(answer.content)
    except ValidationError:
        raise _unexpected(answer, answer.text[:200]) from None
    after = answer.headers.get("Retry-After", "")
    return RefusedError(problem, float(after) if after.isdigit() else None)


def _unexpected(answer: httpx.Response, got: str) -> RefusedError:
    return RefusedError(
        ProblemKind.UNEXPECTED_ANSWER.problem(
            f"{answer.request.method} {answer.request.url} answered {answer.status_code}: {got}",
            status=answer.status_code,
            action="check that the URL is a solrl rollout service",
        )
    )


def _check_served(request: RolloutRequest, line: GroupLine, url: str) -> None:
    """Raise 409 `served-differently` for a group of another model or adapter version, before anybody uses it."""
    if (line.served.model, line.served.adapter) != (request.model, request.adapter):
        raise ProblemError(
            ProblemKind.SERVED_DIFFERENTLY,
            f"the service at {url} made group {line.group.prompt_id!r} in another way than it was asked to",
            where="served.adapter",
            got=line.served.model_dump(mode="json", include={"model", "adapter"}),
            expected=request.model_dump(mode="json", include={"model", "adapter"}),
            action="a service answers under exactly the version it is asked for: look at what stands between",
        )


def _remaining(request: RolloutRequest, made: Collection[str]) -> RolloutRequest:
    """The request without the prompts that are made."""
    if not made:
        return request
    places = [i for i, prompt in enumerate(request.prompts) if prompt.id not in made]
    candidates = request.candidates
    if candidates.seeds is not None:
        candidates = Candidates(seeds=tuple(candidates.seeds[i] for i in places))
    return request.model_copy(update={"prompts": tuple(request.prompts[i] for i in places), "candidates": candidates})
