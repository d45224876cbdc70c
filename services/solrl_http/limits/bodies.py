"""Request bodies, within limits of size, time and memory, all counted as data arrives."""

import asyncio
import io
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from solrl_proto.json_size import MAX_PARSED_BYTES, parsed_bytes
from solrl_proto.problems import ProblemKind
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from solrl_http.problem_responses import Refusal
from solrl_http.settings import HttpSettings

RATE = 16 * 1024
"""Bytes of a body that a client must send per second, on average over every `slow_client_timeout` seconds."""
RETRY_AFTER_S = 5


class InflightBytes:
    """A budget for bytes of requests in memory: in total and by tenant."""

    def __init__(
        self,
        limit: int,
        tenant_limit: int,
        of: str = "bodies and images",
        where: str = "body",
        setting: str = "max_inflight_bytes",
    ) -> None:
        """For refusals: `of` are the things that have the bytes, `where` a request names them, `setting` the limit."""
        self._limit = limit
        self._tenant_limit = tenant_limit
        self._of, self._where, self._setting = of, where, setting
        self._by_tenant: Counter[str | None] = Counter()

    @property
    def reserved(self) -> int:
        """Bytes of all tenants."""
        return self._by_tenant.total()

    def reserve(self, tenant: str | None, size: int) -> None:
        """Count `size` more bytes.

        Raises:
            Refusal: 503 `too-many-bytes`; nothing is counted.
        """
        of_all = ("all requests", self.reserved, self._limit)
        for whose, reserved, limit in (of_all, ("the tenant's requests", self._by_tenant[tenant], self._tenant_limit)):
            if reserved + size > limit:
                raise Refusal(
                    ProblemKind.TOO_MANY_BYTES,
                    f"{self._of} of {whose} have {reserved} bytes now, and {size} more would exceed the limit",
                    headers={"Retry-After": str(RETRY_AFTER_S)},
                    where=self._where,
                    got=size,
                    expected=f"at most {max(0, limit - reserved)} bytes now",
                    action=f"send the same request again later, or raise {self._setting} of the service",
                )
        self._by_tenant[tenant] += size

    def release(self, tenant: str | None, size: int) -> None:
        """Count `size` fewer bytes."""
        self._by_tenant[tenant] -= size
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]


@dataclass
class Pace:
    """Deadline of the next `RATE * slow` bytes of a body, however fast the earlier bytes came."""

    slow: float
    due: float
    _since: int = 0

    def add(self, size: int, now: float) -> None:
        """Count received bytes; enough of them begin the next window."""
        self._since += size
        if self._since >= RATE * self.slow:
            self._since, self.due = 0, now + self.slow


class Bodies:
    """Middleware behind access control that limits bodies, and gives them to the application as one message.

    A body counts towards the budget from before its first byte is read until its request is answered: with its
    Content-Length or, without one, with the bytes received so far. Routes get `request.state.reserve`: it counts
    further bytes until the request is answered, or raises the 503. JSON that would take more than `MAX_PARSED_BYTES` is
    refused before it is parsed.
    """

    def __init__(self, app: ASGIApp, settings: HttpSettings, budget: InflightBytes) -> None:
        self._app = app
        self._settings = settings
        self._budget = budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with a `receive` that raises the refusals, so that the application answers them."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        caller = scope["state"].get("caller")
        tenant = caller.tenant if caller is not None else None
        reserved = 0
        complete = False

        def reserve(size: int) -> None:
            nonlocal reserved
            self._budget.reserve(tenant, size)
            reserved += size

        async def collected() -> Message:
            nonlocal complete
            if complete:
                return await receive()
            message = await self._collect(scope, receive, reserve)
            complete = True
            return message

        scope["state"]["reserve"] = reserve
        try:
            await self._app(scope, collected, send)
        finally:
            self._budget.release(tenant, reserved)

    async def _collect(self, scope: Scope, receive: Receive, reserve: Callable[[int], None]) -> Message:
        """The whole body as one message, or the disconnection before its end."""
        headers, setting = dict(scope["headers"]), scope["state"]["rule"].body_limit_setting
        limit: int = getattr(self._settings, setting)
        length = headers.get(b"content-length", b"").decode("latin-1")
        counted = int(length) if length.isdecimal() else 0
        if counted > limit:
            raise _body_too_large(f"{counted} bytes", limit, setting)
        reserve(counted)
        loop, slow = asyncio.get_running_loop(), self._settings.slow_client_timeout
        pace = Pace(slow, loop.time() + slow)
        # A buffer of the announced size neither grows nor is copied. Without a size, parts are joined at the end,
        # because buffers that grow leave holes in the heap.
        buffer = io.BytesIO(bytes(counted)) if counted else None
        parts: list[bytes] = []
        size, more = 0, True
        while more:
            try:
                async with asyncio.timeout_at(pace.due):
                    message = await receive()
            except TimeoutError:
                raise _too_slow(size) from None
            if message["type"] == "http.disconnect":
                return message
            part, more = message.get("body", b""), message.get("more_body", False)
            pace.add(len(part), loop.time())
            size += len(part)
            if size > limit:
                raise _body_too_large(f"{size} bytes and more", limit, setting)
            if size > counted:
                reserve(size - counted)
                counted = size
            if buffer is None:
                parts.append(part)
            else:
                buffer.write(part)
        body = b"".join(parts) if buffer is None else buffer.getvalue()
        if b"application/json" in headers.get(b"content-type", b"").lower():
            _require_small_json(body)
        return {"type": "http.request", "body": body, "more_body": False}


def _require_small_json(body: bytes) -> None:
    size = parsed_bytes(body)
    if size > MAX_PARSED_BYTES:
        raise Refusal(
            ProblemKind.BODY_TOO_LARGE,
            "the body has more lists, objects and numbers than the service accepts",
            where="body",
            got=f"about {size} bytes once it is parsed",
            expected=f"at most {MAX_PARSED_BYTES} bytes",
            action="send fewer prompts at a time, with less metadata",
        )


def _body_too_large(got: str, limit: int, setting: str) -> Refusal:
    return Refusal(
        ProblemKind.BODY_TOO_LARGE,
        "the body is larger than the service accepts",
        where="body",
        got=got,
        expected=f"at most {limit} bytes",
        action=f"send less at a time, or raise {setting} of the service",
    )


def _too_slow(received: int) -> Refusal:
    return Refusal(
        ProblemKind.REQUEST_TIMEOUT,
        "the request's body was not complete in time",
        headers={"Connection": "close"},
        where="body",
        got=f"{received} bytes",
        expected=f"{RATE} bytes per second, on average over the service's slow_client_timeout",
        action="send the request again over a faster connection, or raise slow_client_timeout of the service",
    )
