"""Client of the rollout service's HTTP API."""

import base64
import copy
import time
from collections.abc import Callable, Collection, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
from pydantic import TypeAdapter, ValidationError
from solrl_proto.adapters import (
    ADAPTER_MEDIA_TYPE,
    DIGEST_HEADER,
    AdapterFile,
    AdapterInfo,
    AdapterList,
    RunList,
)
from solrl_proto.identifiers import Message, Precision
from solrl_proto.invalid import invalid_request
from solrl_proto.models import ModelInfo, ModelList, Numerics
from solrl_proto.printable import printable
from solrl_proto.problems import Problem, ProblemError, ProblemKind
from solrl_proto.rollouts import (
    STREAM_MEDIA_TYPE,
    Candidates,
    EndLine,
    ErrorLine,
    RolloutAnswer,
    RolloutGroup,
    RolloutRequest,
    RolloutTimings,
    StartLine,
    StreamLine,
)
from solrl_proto.status import IterationReport

from solrl_client.addresses import check_rollout_url
from solrl_client.answers import AnswerCheck, check_pushed, longest_line
from solrl_client.connections import http_client
from solrl_client.retries import OnWait, Retries, ignore
from solrl_client.tokens import bearer_token
from solrl_client.transport import (
    HEADERS,
    Document,
    RefusedError,
    first_invalid_field,
    read_answer,
    read_document,
    refusal,
    stream_lines,
    unexpected,
)

_RETRIED = {408, 429, 502, 503, 504}
_TOKEN_PROBLEMS = (ProblemKind.UNAUTHENTICATED, ProblemKind.FORBIDDEN)
TOKEN_ADVICE = "the token is taken from SOLRL_TOKEN, or from the file that SOLRL_TOKEN_PATH names"
_RESTORES = 3
"""Immediate retries after `Restore` without progress; with replicas that share no store, retries would never end."""
_JSON = {"Content-Type": "application/json"}
_LINE: TypeAdapter[StreamLine] = TypeAdapter(StreamLine)

Value = TypeVar("Value")
Restore = Callable[[Problem], bool]
"""Removes the cause of a refusal, if it can; then the request is repeated."""


def rollout_request(**fields: Any) -> RolloutRequest:
    """The request with these fields.

    Raises:
        ProblemError: 422 `invalid-request`, as a service would answer.
    """
    try:
        return RolloutRequest(**fields)
    except ValidationError as error:
        raise RefusedError(invalid_request(error.errors())) from None


class RolloutClient:
    """A client of the rollout service.

    Versions and seeds are exact, so every request can be repeated. Transport errors and the statuses 408, 429 and 502
    to 504 are retried with growing pauses, until `patience` seconds pass without an answer. Each part of an answer is
    checked against the request before it is used.

    Args:
        url: base URL, e.g. http://gpu-node:8100.
        token: bearer token; by default that of the environment, see `bearer_token`, if there is one.
        timeout: seconds to wait for the next bytes of an answer; exploring a large group takes a while.
        patience: seconds to retry.
        pause: seconds before the first retry.
        awaited: additional problem kinds that are temporary and are retried.
        on_wait: called at each pause before a retry.

    Raises:
        ValueError: the URL, or the environment's token or proxy, cannot be used.
        OSError: the file with the token cannot be read.
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
        on_wait: OnWait = ignore,
    ) -> None:
        self.url = check_rollout_url(url)
        token = bearer_token("SOLRL_TOKEN") if token is None else token
        self._patience = patience
        self._pause = pause
        self._awaited = frozenset(awaited)
        self._on_wait = on_wait
        headers = HEADERS | ({"Authorization": f"Bearer {token}"} if token else {})
        self._http = http_client(self.url, headers=headers, timeout=httpx.Timeout(timeout, connect=10.0))

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
        """All hosted models, and the service's noise contract."""
        return self._document(ModelList, "GET", "/v1/models")

    def model(self, name: str) -> ModelInfo:
        """One hosted model. ProblemError: unreachable, or `model-not-found`, with the hosted models."""
        return self.find_model(self.models(), name)

    def find_model(self, listed: ModelList, name: str) -> ModelInfo:
        """A model in this service's answer to `models`.

        Raises:
            ProblemError: `model-not-found`; lists the hosted models.
        """
        hosted = {model.name: model for model in listed.models}
        if name not in hosted:
            raise ProblemError(
                ProblemKind.MODEL_NOT_FOUND,
                f"the service at {self.url} does not host {name!r}",
                got=name,
                expected=sorted(hosted),
                action="start a service with --model, or name a hosted model",
            )
        return hosted[name]

    def runs(self) -> RunList:
        """All runs of the caller."""
        return self._document(RunList, "GET", "/v1/runs")

    def adapters(self, run: str) -> AdapterList | None:
        """Stored adapter versions of a run; None if the service has no such run."""
        try:
            return self._document(AdapterList, "GET", f"/v1/runs/{run}/adapters")
        except ProblemError as error:
            if error.problem.kind != ProblemKind.RUN_NOT_FOUND:
                raise
            return None

    def rollouts(
        self,
        request: RolloutRequest,
        *,
        fingerprint: str | None = None,
        numerics: Mapping[Precision, Numerics] | None = None,
        on_group: Callable[[RolloutGroup], None] = lambda group: None,
        restore: Restore | None = None,
    ) -> RolloutAnswer:
        """Request candidates: their seeds and scores, and their images if the request asks for images.

        The answer is streamed. After an interruption only the missing groups are requested again.

        Args:
            request: prompts, candidates and plan.
            fingerprint: fingerprint of model and rewards that the service must have; None to accept any.
            numerics: numerics of each precision, as `model` announced them; None to accept any.
            on_group: called once with each group, as soon as it has arrived and been checked.
            restore: see `Restore`.

        Returns:
            The answer. If only its end was lost, `seconds.generate` is the time until then, and the other
            phases are 0.

        Raises:
            ProblemError: refused, unreachable, 409 `served-differently`: the answer does not match the request, or its
                parts differ; or 422 `digest-mismatch`: the service serves a different model.
        """
        received: dict[str, RolloutGroup] = {}
        check = AnswerCheck(request, self.url, fingerprint, numerics)
        began = time.monotonic()

        def attempt() -> RolloutTimings:
            if len(received) == len(request.prompts):
                return RolloutTimings(queued=0, switch=0, generate=time.monotonic() - began, reward=0)
            return self._stream(_remaining(request, received.keys()), received, check, on_group)

        seconds = self._patiently(attempt, restore=restore, progress=lambda: len(received))
        assert check.served is not None
        groups = tuple(received[prompt.id] for prompt in request.prompts)
        return RolloutAnswer(**dict(check.served), groups=groups, seconds=seconds)

    def push(self, run: str, version: int, parent: int | None, model: str, body: bytes) -> AdapterInfo:
        """Store an adapter file as `version` on top of `parent`. Storing the same bytes again succeeds.

        Raises:
            ProblemError: refused, unreachable, or 409 `served-differently`: the service stored something different.
        """
        body = body if isinstance(body, AdapterFile) else AdapterFile(body)
        digest = base64.b64encode(bytes.fromhex(body.digest.removeprefix("sha256:"))).decode()
        stored = self._document(
            AdapterInfo,
            "PUT",
            f"/v1/runs/{run}/adapters/{version}",
            params={"model": model} | ({} if parent is None else {"parent": parent}),
            content=body,
            headers={DIGEST_HEADER: f"sha-256=:{digest}:", "Content-Type": ADAPTER_MEDIA_TYPE},
        )
        check_pushed(self.url, stored, run=run, version=version, model=model, body=body)
        return stored

    def wait_for_version(self, run: str, version: int, seconds: float = 600.0) -> AdapterInfo:
        """Wait until another process, such as a trainer, has pushed an adapter version.

        Raises:
            ProblemError: unreachable, or 404 `run-not-found` or `version-not-found` after `seconds`.
        """
        waiting = copy.copy(self)
        waiting._patience = seconds
        waiting._awaited |= {ProblemKind.RUN_NOT_FOUND, ProblemKind.VERSION_NOT_FOUND}
        return waiting._document(AdapterInfo, "GET", f"/v1/runs/{run}/adapters/{version}")

    def report_iteration(self, run: str, report: IterationReport) -> None:
        """Report an iteration."""
        self._ask("POST", f"/v1/runs/{run}/iterations", read_answer, content=_json(report), headers=_JSON)

    def rewind(self, run: str, version: int, head: int) -> None:
        """Make a stored version the run's head again, instead of `head`, and delete all versions after it."""
        self._ask("DELETE", f"/v1/runs/{run}/adapters", read_answer, params={"after": version, "head": head})

    def delete(self, run: str) -> None:
        """Delete all versions of a run; succeeds if there are none."""
        try:
            self._ask("DELETE", f"/v1/runs/{run}", read_answer)
        except ProblemError as error:
            # Not found: this is a retry, and the answer to the first request was lost.
            if error.problem.kind != ProblemKind.RUN_NOT_FOUND:
                raise

    def _stream(
        self,
        request: RolloutRequest,
        received: dict[str, RolloutGroup],
        check: AnswerCheck,
        on_group: Callable[[RolloutGroup], None],
    ) -> RolloutTimings:
        """Add the groups of one request to `received`."""
        headers = _JSON | {"Accept": STREAM_MEDIA_TYPE}
        remaining = {prompt.id for prompt in request.prompts}
        started = False
        with self._http.stream("POST", "/v1/rollouts", content=_json(request), headers=headers) as answer:
            for text in stream_lines(answer, longest_line(request)):
                try:
                    line = _LINE.validate_json(text, extra="ignore")
                except ValidationError as error:
                    fault = first_invalid_field(error)
                    raise unexpected(answer, f"a line that cannot be read ({fault})") from None
                match line:
                    case ErrorLine():
                        raise refusal(line.problem)
                    case StartLine() if not started:
                        check.start(line.served)
                        started = True
                    case RolloutGroup() if started and line.prompt_id in remaining:
                        check.group(line)
                        remaining.remove(line.prompt_id)
                        received[line.prompt_id] = line
                        on_group(line)
                    case EndLine() if started and not remaining:
                        return line.seconds
                    case _:
                        missing_part = f"the groups {sorted(remaining)}" if remaining else "the end"
                        expected = missing_part if started else "the start"
                        raise unexpected(answer, f"{text[:200].decode(errors='replace')}, expected {expected}")
        raise httpx.RemoteProtocolError("the stream ended without its end line")

    def _document(self, model: type[Document], method: str, path: str, **arguments: Any) -> Document:
        return self._ask(method, path, lambda answer: read_document(answer, model), **arguments)

    def _ask(self, method: str, path: str, read: Callable[[httpx.Response], Value], **arguments: Any) -> Value:
        def attempt() -> Value:
            with self._http.stream(method, path, **arguments) as answer:
                return read(answer)

        return self._patiently(attempt)

    def _patiently(
        self,
        attempt: Callable[[], Value],
        *,
        restore: Restore | None = None,
        progress: Callable[[], int] = lambda: 0,
    ) -> Value:
        """Return the result of `attempt`, retried after temporary failures; progress renews the patience."""
        restores, reached = 0, progress()
        with Retries(self._patience, self._pause, server=self.url, on_wait=self._on_wait) as retries:
            while True:
                failure: ProblemError
                after = None
                try:
                    return attempt()
                except (httpx.LocalProtocolError, httpx.UnsupportedProtocol) as error:
                    # The request cannot be sent. The error's text may contain the token, so it is not shown.
                    raise self._unreachable(type(error).__name__, retries.tries) from None
                except httpx.TransportError as error:
                    failure = self._unreachable(f"{type(error).__name__}: {error}", retries.tries)
                except RefusedError as error:
                    restored = restore is not None and restore(error.problem)
                    if restored and restores < _RESTORES:
                        restores += 1
                        continue
                    passes = error.problem.status in _RETRIED or error.problem.kind in self._awaited
                    if not restored and not passes:
                        raise _with_token_advice(error) from None
                    failure, after = error, error.retry_after
                if progress() > reached:
                    retries.renew()
                    restores, reached = 0, progress()
                pause = retries.pause(after, failure.problem.detail)
                if pause is None:
                    raise failure
                time.sleep(pause)

    def _unreachable(self, reason: str, tries: int) -> ProblemError:
        return ProblemError(
            ProblemKind.SERVICE_UNREACHABLE,
            f"no answer from {self.url} after {tries} {'try' if tries == 1 else 'tries'} ({printable(reason, 400)})",
            got=self.url,
            expected="the address of a running rollout service",
            action="start one with `solrl-rollout serve --model …`, or correct the address",
        )


def _json(message: Message) -> bytes:
    """The message without fields at their defaults: an older service refuses fields that it does not know."""
    return message.model_dump_json(exclude_defaults=True).encode()


def _with_token_advice(error: RefusedError) -> RefusedError:
    """The refusal, with advice on where to give a token if a token is at fault, also for a proxy's 401 or 403."""
    problem = error.problem
    foreign = problem.kind == ProblemKind.UNEXPECTED_ANSWER and problem.status in (401, 403)
    if problem.kind not in _TOKEN_PROBLEMS and not foreign:
        return error
    action = f"{problem.action}; {TOKEN_ADVICE}" if problem.action else TOKEN_ADVICE
    return RefusedError(problem.model_copy(update={"action": action}), retry_after=error.retry_after)


def _remaining(request: RolloutRequest, received: Collection[str]) -> RolloutRequest:
    """The request without the prompts whose groups have arrived."""
    if not received:
        return request
    places = [i for i, prompt in enumerate(request.prompts) if prompt.id not in received]
    candidates = request.candidates
    if candidates.seeds is not None:
        candidates = Candidates(seeds=tuple(candidates.seeds[i] for i in places))
    return request.model_copy(update={"prompts": tuple(request.prompts[i] for i in places), "candidates": candidates})
