"""Problem documents for errors, which disclose no internals."""

import json
import math
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from solrl_proto.invalid import SHOWN, invalid_request
from solrl_proto.problems import PROBLEM_MEDIA_TYPE, Problem, ProblemError, ProblemKind
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from solrl_http import logs

_CLIENT_LEFT = 499


def internal_error() -> Problem:
    """The 500 for an error in the service itself."""
    return ProblemKind.INTERNAL.problem(
        "an error in the service itself",
        action="the service's log has the traceback",
    )


class Refusal(HTTPException):
    """A problem with headers. While FastAPI reads a body, it replaces any exception that is no HTTPException."""

    def __init__(
        self, kind: ProblemKind, detail: str, *, headers: Mapping[str, str] | None = None, **fields: Any
    ) -> None:
        """The arguments of `ProblemKind.problem`, and headers of the response."""
        self.problem = kind.problem(detail, **fields)
        super().__init__(self.problem.status, headers=headers)


def install(app: FastAPI) -> None:
    """Answer every exception of `app` with its problem document."""

    @app.exception_handler(ProblemError)
    async def _problem(_: Request, error: ProblemError) -> Response:
        return respond_to(error)

    @app.exception_handler(RequestValidationError)
    async def _invalid(_: Request, error: RequestValidationError) -> Response:
        return respond(invalid_request(error.errors()))

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:
        if isinstance(error, Refusal):
            return respond_to(error)
        # FastAPI's own, of a body that it cannot parse: access control answers for paths and methods.
        detail = f"{request.method} {request.url.path[:SHOWN]}: {error.detail}"
        return respond(ProblemKind.BAD_REQUEST.problem(detail, status=error.status_code, action="see /docs"))

    @app.exception_handler(ClientDisconnect)
    async def _disconnect(_: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=_CLIENT_LEFT)

    @app.exception_handler(Exception)
    async def _unexpected(_: Request, __: Exception) -> Response:
        # Starlette raises the exception again after this answer, and the server logs it with its traceback.
        return respond(internal_error())


def respond_to(error: ProblemError | Refusal) -> Response:
    """The response to an error: its problem document, with Retry-After if it is temporary."""
    if isinstance(error, Refusal):
        return respond(error.problem, error.headers)
    return respond(error.problem, None if error.retry_after is None else {"Retry-After": f"{error.retry_after:.0f}"})


def respond(problem: Problem, headers: Mapping[str, str] | None = None) -> Response:
    """The response with a problem document, whose kind the request's line in the log names."""
    logs.add_fields(problem=problem.kind, detail=problem.detail[:500])
    document = {k: v for k, v in plain(problem.model_dump()).items() if v is not None}
    # ASCII, because an invalid value may contain a lone surrogate, which UTF-8 cannot encode.
    body = json.dumps(document, ensure_ascii=True, allow_nan=False)
    return Response(body, problem.status, headers and dict(headers), PROBLEM_MEDIA_TYPE)


def plain(value: Any) -> Any:
    """`value` as short, strict JSON: no NaN, nothing long or deep."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return value if math.isfinite(value) and abs(value) < 2**63 else str(float(value))
    if isinstance(value, str):
        return value if len(value) <= SHOWN * 10 else f"{value[:SHOWN]}… ({len(value)} characters)"
    if isinstance(value, Mapping):
        return {str(k)[:SHOWN]: plain(v) for k, v in list(value.items())[:32]}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value[:32]]
    return str(value)[:SHOWN]


def draining(
    detail: str = "the service is stopping: it finishes accepted work and refuses new work",
) -> ProblemError:
    """The 503 of a service that is stopping."""
    return ProblemError(
        ProblemKind.DRAINING,
        detail,
        retry_after=10,
        action="send the same request to another replica, or again after the restart",
    )


def unsuitable_prompt(detail: str, prompts: str, fields: Mapping[str, Any]) -> ProblemError:
    """The 422 for a prompt that a reward cannot judge by.

    Args:
        detail: which reward, and why.
        prompts: the field with the prompts.
        fields: `got`, `expected`, and `where` within that field.
    """
    action = "correct the prompt or its metadata, or omit the reward"
    fields = {**fields, "where": f"{prompts}.{fields['where']}", "action": action}
    return ProblemError(ProblemKind.INVALID_REQUEST, detail, **fields)


def reward_failed(detail: str, where: str, *, away: bool) -> ProblemError:
    """The 503 for a reward whose server gives no usable answer (`away`), or the 500 for one that failed on images."""
    if away:
        action = "send the same request again later, or omit the reward; that server's operator can repair it"
        return ProblemError(ProblemKind.REWARD_FAILED, detail, status=503, retry_after=5, where=where, action=action)
    action = "check that the prompt's metadata is what the reward needs, or omit the reward"
    return ProblemError(ProblemKind.REWARD_FAILED, detail, where=where, action=action)
