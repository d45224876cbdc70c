"""Request bodies, within limits of size, time and memory, all counted as data arrives."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from solrl_proto.json_size import MAX_PARSED_BYTES, parsed_bytes
from solrl_proto.problems import ProblemKind
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from solrl_http.problem_responses import Refusal, body_too_large

RATE = 16 * 1024
"""Bytes of a body that a client must send per second, on average over every `slow_client_timeout` seconds."""
RETRY_AFTER_S = 5


async def read_body(request: Request, limit: int, refuse: Callable[[str], Exception]) -> bytes:
    """Read a raw body of at most `limit` bytes; raise `refuse(size)` as soon as it is known to be larger.

    Raises:
        ClientDisconnect: the connection ended before the body did.
    """
    length = _declared(request.scope)
    if length > limit:
        raise refuse(f"{length} bytes")
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise refuse(f"{size} bytes and more")
        parts.append(part)
    return b"".join(parts)


class InflightBytes:
    """A budget for the bytes of all request bodies, and of latents in answers, in memory: in total and by tenant."""

    def __init__(self, limit: int, tenant_limit: int) -> None:
        self.limit = limit
        self.tenant_limit = tenant_limit
        self._by_tenant: Counter[str | None] = Counter()

    @property
    def held(self) -> int:
        """Bytes of all tenants."""
        return self._by_tenant.total()

    def take(self, tenant: str | None, size: int) -> None:
        """Count `size` more bytes.

        Raises:
            Refusal: 503 `too-many-bytes`; nothing is counted.
        """
        if self.held + size > self.limit:
            raise _too_many_bytes("all requests", self.held, size, self.limit)
        if self._by_tenant[tenant] + size > self.tenant_limit:
            raise _too_many_bytes("the tenant's requests", self._by_tenant[tenant], size, self.tenant_limit)
        self._by_tenant[tenant] += size

    def give_back(self, tenant: str | None, size: int) -> None:
        """Count `size` fewer bytes."""
        self._by_tenant[tenant] -= size
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]


@dataclass
class Pace:
    """The time by which the next `RATE * slow` bytes of a body must have arrived, regardless of earlier ones."""

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
    Content-Length or, without one, with the bytes received so far. Routes get `request.state.hold`, which counts other
    bytes until the request is answered, or raises the 503. JSON that would take more than `MAX_PARSED_BYTES` is refused
    before it is parsed. A route of PUT collects its body by itself, up to a limit of its own.
    """

    def __init__(self, app: ASGIApp, limit: int, budget: InflightBytes, slow: float) -> None:
        """`limit`: bytes of a body; `slow`: seconds over which a body must average `RATE`."""
        self._app = app
        self._limit = limit
        self._budget = budget
        self._slow = slow

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with a `receive` that raises the refusals, so that the application answers them."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        caller = scope["state"].get("caller")
        tenant = caller.tenant if caller is not None else None
        held = 0

        def hold(size: int) -> None:
            nonlocal held
            self._budget.take(tenant, size)
            held += size

        scope["state"]["hold"] = hold
        limited = _Limited(receive, _declared(scope), hold, self._slow)
        body = limited.receive if scope["method"] == "PUT" else self._collected(scope, limited)
        try:
            await self._app(scope, body, send)
        finally:
            self._budget.give_back(tenant, held)

    def _collected(self, scope: Scope, limited: "_Limited") -> Receive:
        async def receive() -> Message:
            if limited.complete:
                return await limited.receive()
            body = await read_body(
                Request(scope, limited.receive),
                self._limit,
                lambda got: body_too_large(got, self._limit, "max_body_bytes"),
            )
            if b"application/json" in dict(scope["headers"]).get(b"content-type", b"").lower():
                _require_small_json(body)
            return {"type": "http.request", "body": body, "more_body": False}

        return receive


class _Limited:
    """A body that counts as it arrives, and that must arrive in time."""

    def __init__(self, receive: Receive, declared: int, hold: Callable[[int], None], slow: float) -> None:
        self.complete = False
        self._receive = receive
        self._declared = declared
        self._hold = hold
        self._received = self._held = 0
        self._slow = slow
        self._pace: Pace | None = None

    async def receive(self) -> Message:
        """The next part."""
        if self.complete:
            return await self._receive()
        self._hold_up_to(self._declared)
        loop = asyncio.get_running_loop()
        pace = self._pace = self._pace or Pace(self._slow, loop.time() + self._slow)
        try:
            async with asyncio.timeout_at(pace.due):
                message = await self._receive()
        except TimeoutError:
            raise _too_slow(self._received) from None
        size = len(message.get("body", b""))
        self._received += size
        pace.add(size, loop.time())
        self.complete = not message.get("more_body", False)
        self._hold_up_to(self._received)
        return message

    def _hold_up_to(self, size: int) -> None:
        if size > self._held:
            self._hold(size - self._held)
            self._held = size


def _declared(scope: Scope) -> int:
    """The Content-Length, 0 without one."""
    length = dict(scope["headers"]).get(b"content-length", b"").decode("latin-1")
    return int(length) if length.isdecimal() else 0


def _require_small_json(body: bytes) -> None:
    size = parsed_bytes(body)
    if size > MAX_PARSED_BYTES:
        raise Refusal(
            ProblemKind.BODY_TOO_LARGE.problem(
                "the body has more lists, objects and numbers than the service accepts",
                where="body",
                got=f"about {size} bytes once it is parsed",
                expected=f"at most {MAX_PARSED_BYTES} bytes",
                action="send fewer prompts at a time, with less metadata",
            )
        )


def _too_many_bytes(whose: str, held: int, size: int, limit: int) -> Refusal:
    problem = ProblemKind.TOO_MANY_BYTES.problem(
        f"bodies and latents of {whose} have {held} bytes now, and {size} more would exceed the limit",
        where="body",
        got=size,
        expected=f"at most {limit - held} bytes now",
        action="send the same request again later, or raise max_inflight_bytes of the service",
    )
    return Refusal(problem, {"Retry-After": str(RETRY_AFTER_S)})


def _too_slow(received: int) -> Refusal:
    problem = ProblemKind.REQUEST_TIMEOUT.problem(
        "the request's body was not complete in time",
        where="body",
        got=f"{received} bytes",
        expected=f"{RATE} bytes per second, on average over the service's slow_client_timeout",
        action="send the request again over a faster connection, or raise slow_client_timeout of the service",
    )
    return Refusal(problem, {"Connection": "close"})
