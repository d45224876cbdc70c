"""Backpressure: while the queue is full, new work is refused by its head alone, so that a refusal costs little."""

from typing import Protocol

from solrl_proto.problems import ProblemError
from starlette.types import ASGIApp, Receive, Scope, Send

from solrl_http.problems import respond_to


class Queue(Protocol):
    """A service with a bounded queue."""

    def require_capacity(self, tenant: str) -> None:
        """Raise the ProblemError of work that the tenant cannot queue now."""


class Backpressure:
    """Middleware behind access control: refuses work, without reading the body, while the tenant can queue no more."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] == "http" and scope["state"]["rule"].declaration.queues_work:
            service: Queue = scope["app"].state.service
            try:
                service.require_capacity(scope["state"]["caller"].tenant)
            except ProblemError as error:
                await respond_to(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)
