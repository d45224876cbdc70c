"""Dependencies that routes of all services share, and the documentation of their problems.

Dependencies are coroutines although they await nothing: FastAPI would run plain functions in a thread, which gets
little time while the service computes.
"""

import asyncio
import base64
import gzip
import hashlib
from collections.abc import Coroutine, Mapping
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request, Response
from solrl_proto.problems import PROBLEM_MEDIA_TYPE, ProblemError, ProblemKind
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from solrl_http.access import Caller

PROBLEMS: dict[int | str, dict[str, Any]] = {
    "default": {
        "description": "A problem document (RFC 9457)",
        "content": {PROBLEM_MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
    }
}
UNCACHED = {"Cache-Control": "no-cache", "Referrer-Policy": "no-referrer"}
_COMPRESS_FROM = 1024
"""Bytes."""


async def running_service(request: Request) -> Any:
    """The service."""
    return request.app.state.service


async def _caller(request: Request) -> Caller:
    caller: Caller = request.state.caller  # set by access control, except on open routes
    return caller


async def refuse_unknown_parameters(request: Request) -> None:
    """Refuse query parameters that an API route does not have; a mistyped one would otherwise be ignored silently."""
    route = request.scope["route"]
    if not route.path.startswith("/v1/"):
        return  # links to the page may have any
    parameters = [field.alias for field in route.dependant.query_params]
    unknown = [name for name in request.query_params if name not in parameters]
    if unknown:
        raise ProblemError(
            ProblemKind.UNKNOWN_PARAMETER,
            f"{request.method} {route.path} has no query parameter {unknown[0][:80]!r}",
            where="query",
            got=[name[:80] for name in unknown[:5]],
            expected=parameters or "none",
            action="omit it, or correct its name",
        )


CallerDep = Annotated[Caller, Depends(_caller)]


def compressed(request: Request, body: bytes, media_type: str, headers: Mapping[str, str]) -> Response:
    """A response of text, which is compressed if it is long and the client accepts it."""
    headers = {"Vary": "Accept-Encoding", **headers}
    if len(body) >= _COMPRESS_FROM and "gzip" in request.headers.get("accept-encoding", ""):
        body, headers["Content-Encoding"] = gzip.compress(body, 5, mtime=0), "gzip"
    return Response(body, media_type=media_type, headers=headers)


def document_headers(script: str, style: str, images: str, *more: str) -> dict[str, str]:
    """Headers of an HTML document that loads nothing else, by the sources of its scripts, styles and images."""
    policy = [
        "default-src 'none'",
        f"script-src {script}",
        f"style-src {style}",
        f"img-src {images}",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        *more,
    ]
    return {"Content-Security-Policy": "; ".join(policy), **UNCACHED}


def source_hash(text: str) -> str:
    """A script or style within a document, as a source."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


Value = TypeVar("Value")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Value]) -> Value:
    """Return the result of `work`, which is cancelled when the client disconnects.

    Raises:
        ClientDisconnect: the client disconnected.
    """
    task, departure = asyncio.create_task(work), asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, departure}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        departure.cancel()
        await asyncio.gather(task, departure, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    # The body has been read, so the next message is the end of the connection.
    while (await receive())["type"] != "http.disconnect":
        pass
