"""A budget for the bytes of all request bodies, and of latents in answers, in memory.

A body counts from before its first byte is read until its request is answered. It counts with its Content-Length or,
without one, with the bytes received so far. Latents count from when their request is accepted. What would exceed the
budget is refused.
"""

from collections import Counter

from solrl_proto.problems import ProblemKind
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

RETRY_AFTER_S = 5


class InflightBytes:
    """Bytes in memory, in total and by tenant."""

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
            HTTPException: 503 `too-many-bytes`; nothing is counted.
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


class InflightLimit:
    """Middleware behind access control that limits the bytes of all bodies and answered latents together.

    It gives routes `request.state.hold`, which counts bytes until the request is answered, or raises the 503.
    """

    def __init__(self, app: ASGIApp, budget: InflightBytes) -> None:
        self._app = app
        self._budget = budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with a counting `receive`."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        caller = scope["state"].get("caller")
        tenant = caller.tenant if caller is not None else None
        length = dict(scope["headers"]).get(b"content-length", b"").decode("latin-1")
        declared = int(length) if length.isdecimal() else 0
        received = taken = held = 0

        def take(size: int) -> None:
            nonlocal taken
            self._budget.take(tenant, size)
            taken += size

        def hold(size: int) -> None:
            nonlocal held
            self._budget.take(tenant, size)
            held += size

        async def counted() -> Message:
            nonlocal received
            # Raised here, not before the app is called, so that the app's exception handlers answer.
            take(max(0, declared - taken))
            message = await receive()
            received += len(message.get("body", b""))
            take(max(0, received - taken))
            return message

        scope["state"]["hold"] = hold
        try:
            await self._app(scope, counted, send)
        finally:
            self._budget.give_back(tenant, taken + held)


def _too_many_bytes(whose: str, held: int, size: int, limit: int) -> HTTPException:
    """The 503, as an HTTPException: FastAPI replaces any other exception that is raised while it reads a body."""
    problem = ProblemKind.TOO_MANY_BYTES.problem(
        f"bodies and latents of {whose} have {held} bytes now, and {size} more would exceed the limit",
        where="body",
        got=size,
        expected=f"at most {limit - held} bytes now",
        action="send the same request again later, or raise max_inflight_bytes of the service",
    )
    return HTTPException(503, detail=problem, headers={"Retry-After": str(RETRY_AFTER_S)})  # type: ignore[arg-type]
