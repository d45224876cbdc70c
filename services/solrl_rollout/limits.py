"""Bodies are counted as they come in: a declared length may lie or be missing."""

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from solrl_rollout.problems import body_too_large


async def read_body(request: Request, limit: int, setting: str) -> bytes:
    """A raw body of at most `limit` bytes; 413 as soon as it is known to be larger."""
    _check_declared(request.headers.get("content-length"), limit, setting)
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise body_too_large(f"{size} bytes and more", limit, setting)
        parts.append(part)
    return b"".join(parts)


class JsonBodyLimit:
    """Middleware that holds every body except that of a PUT, which counts its own, to `limit` bytes."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with a counting `receive`."""
        if scope["type"] != "http" or scope["method"] == "PUT":
            await self._app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"").decode("latin-1")
        size = 0

        async def counted() -> Message:
            nonlocal size
            # Raised in here, not before the app is called, so that the app's handlers make the answer.
            _check_declared(declared, self._limit, "max_body_bytes")
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._limit:
                raise body_too_large(f"{size} bytes and more", self._limit, "max_body_bytes")
            return message

        await self._app(scope, counted, send)


def _check_declared(length: str | None, limit: int, setting: str) -> None:
    if length and length.isdigit() and int(length) > limit:
        raise body_too_large(f"{length} bytes", limit, setting)
