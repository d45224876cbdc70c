"""HTTP answers of a service, read within bounds and with their refusals as exceptions.

The service may be broken, overloaded or another program altogether, so nothing that it sends is trusted: bodies are
bounded and never decompressed, and its texts are made safe to print.
"""

from collections.abc import Iterator
from typing import TypeVar

import httpx
from pydantic import BaseModel, ValidationError
from solrl_proto.printable import printable, printable_value
from solrl_proto.problems import Problem, ProblemError, ProblemKind

HEADERS = {"Accept-Encoding": "identity"}
"""Asks for bodies as they are: a compressed one could be of any size."""
MAX_DOCUMENT = 16 * 2**20
"""Bytes of the largest JSON document."""
_MAX_PROBLEM = 2**18

Document = TypeVar("Document", bound=BaseModel)


class RefusedError(ProblemError):
    """The service's own problem."""


def read_document(answer: httpx.Response, model: type[Document], limit: int = MAX_DOCUMENT) -> Document:
    """The JSON document of a streamed answer, of at most `limit` bytes, without the unknown fields of a newer service.

    Raises:
        RefusedError: the answer is a refusal, is too large, or is no such document.
    """
    body = read_answer(answer, limit)
    try:
        return model.model_validate_json(body, extra="ignore")
    except ValidationError as error:
        raise unexpected(answer, first_invalid_field(error)) from None


def read_answer(answer: httpx.Response, limit: int = MAX_DOCUMENT) -> bytes:
    """The body of a streamed answer, of at most `limit` bytes.

    Raises:
        RefusedError: the answer is a refusal, or is too large.
    """
    if not answer.is_success:
        raise _refusal(answer)
    body = read_within(answer, limit)
    if body is None:
        raise unexpected(answer, f"a document of more than {limit} bytes")
    return body


def stream_lines(answer: httpx.Response, limit: int) -> Iterator[bytes]:
    """Lines of a streamed answer, without their newlines.

    Args:
        answer: the answer to a request for a stream.
        limit: bytes of the longest line.

    Raises:
        RefusedError: the answer is a refusal, or a line is too long.
        httpx.TransportError: the answer was cut, perhaps within a line.
    """
    if not answer.is_success:
        raise _refusal(answer)
    _require_plain(answer)
    line = bytearray()
    for part in answer.iter_raw():
        first, *lines = part.split(b"\n")
        line += first
        for tail in lines:
            if len(line) > limit:
                break
            yield bytes(line)
            line = bytearray(tail)
        if len(line) > limit:
            raise unexpected(answer, f"a line of more than {limit} bytes")
    if line:
        raise httpx.RemoteProtocolError("the stream was cut within a line")


def unexpected(answer: httpx.Response, got: str) -> RefusedError:
    """The problem of an answer that a service of solrl would not give."""
    return RefusedError(
        ProblemKind.UNEXPECTED_ANSWER.problem(
            f"{answer.request.method} {answer.request.url} answered {answer.status_code}: {printable(got, 400)}",
            status=answer.status_code,
            action="check that the URL is a service of solrl",
        )
    )


def refusal(problem: Problem, retry_after: float | None = None) -> RefusedError:
    """A service's problem, not too long to print."""
    shortened = problem.model_copy(
        update={
            "title": printable(problem.title, 200),
            "where": printable(problem.where, 200) if problem.where else None,
            "got": printable_value(problem.got),
            "expected": printable_value(problem.expected),
        }
    )
    return RefusedError(shortened, retry_after=retry_after)


def _refusal(answer: httpx.Response) -> RefusedError:
    body = read_within(answer, _MAX_PROBLEM)
    if body is None:
        return unexpected(answer, f"a refusal of more than {_MAX_PROBLEM} bytes")
    try:
        problem = Problem.model_validate_json(body, extra="ignore")
    except ValidationError:
        return unexpected(answer, printable(body.decode(errors="replace"), 200))
    return refusal(problem, retry_after(answer))


def retry_after(answer: httpx.Response) -> float | None:
    """Seconds in the header Retry-After; None without it, and for a date."""
    after = answer.headers.get("Retry-After", "")
    return float(after) if after.isascii() and after.isdigit() else None


def read_within(answer: httpx.Response, limit: int) -> bytes | None:
    """The body of a streamed answer, of any status; None if it is longer than `limit` bytes.

    Raises:
        RefusedError: the body is compressed.
    """
    _require_plain(answer)
    body = bytearray()
    for part in answer.iter_raw():
        body += part
        if len(body) > limit:
            return None
    return bytes(body)


def _require_plain(answer: httpx.Response) -> None:
    coding = answer.headers.get("Content-Encoding", "identity")
    if coding != "identity":
        raise unexpected(answer, f"a body in Content-Encoding {coding!r}, which was not asked for")


def first_invalid_field(error: ValidationError) -> str:
    """The first fault of a document, with its place."""
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"]))
    return f"{place}: {first['msg']}" if place else first["msg"]
