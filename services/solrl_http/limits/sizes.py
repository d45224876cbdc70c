"""Size limits of heads and bodies, counted as data arrives: a declared length may be wrong or missing."""

from solrl_proto.json_size import MAX_PARSED_BYTES, parsed_bytes
from solrl_proto.problems import Problem, ProblemKind
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from solrl_http.limits.bodies import read_body
from solrl_http.problems import body_too_large, respond

MAX_HEAD_BYTES = 32 * 1024
"""Limit of a request's first line and headers together."""


def head_too_large(got: str) -> Problem:
    """Problem for a head that is too large (431)."""
    return ProblemKind.HEAD_TOO_LARGE.problem(
        "the path and the headers have more bytes than the service accepts",
        where="header",
        got=got,
        expected=f"at most {MAX_HEAD_BYTES} bytes",
        action="send fewer or shorter headers",
    )


def two_lengths() -> Problem:
    """Problem for a body with two lengths (400): a proxy may see its end elsewhere, which allows request smuggling."""
    return ProblemKind.BAD_REQUEST.problem(
        "the request has both Content-Length and Transfer-Encoding",
        where="header.Content-Length",
        expected="one of them",
        action="send one of them",
    )


class HeadLimit:
    """Middleware that limits heads to `MAX_HEAD_BYTES`, and refuses those with two lengths of one body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 431 or 400."""
        if scope["type"] == "http":
            size = len(scope.get("raw_path") or b"") + len(scope["query_string"])
            size += sum(len(name) + len(value) + 4 for name, value in scope["headers"])
            if size > MAX_HEAD_BYTES:
                await respond(head_too_large(f"{size} bytes"))(scope, receive, send)
                return
            if {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope["headers"]}:
                await respond(two_lengths(), {"Connection": "close"})(scope, receive, send)
                return
        await self._app(scope, receive, send)


class BodyLimit:
    """Middleware that collects bodies of at most `limit` bytes, except those of PUT, whose route does so by itself.

    JSON that would take more than `MAX_PARSED_BYTES` is refused before it is parsed.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with a `receive` that returns the body as one message."""
        if scope["type"] != "http" or scope["method"] == "PUT":
            await self._app(scope, receive, send)
            return
        complete = False

        async def collected() -> Message:
            nonlocal complete
            if complete:
                return await receive()
            # Raised here, not before the app is called, so that the app's exception handlers answer.
            body = await read_body(Request(scope, receive), self._limit, self._refuse)
            if b"application/json" in dict(scope["headers"]).get(b"content-type", b"").lower():
                _require_small_json(body)
            complete = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, collected, send)

    def _refuse(self, got: str) -> HTTPException:
        return body_too_large(got, self._limit, "max_body_bytes")


def _require_small_json(body: bytes) -> None:
    size = parsed_bytes(body)
    if size > MAX_PARSED_BYTES:
        problem = ProblemKind.BODY_TOO_LARGE.problem(
            "the body has more lists, objects and numbers than the service accepts",
            where="body",
            got=f"about {size} bytes once it is parsed",
            expected=f"at most {MAX_PARSED_BYTES} bytes",
            action="send fewer prompts at a time, with less metadata",
        )
        raise HTTPException(413, detail=problem)  # type: ignore[arg-type]
