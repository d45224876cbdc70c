"""The end of a service: new work is refused, and requests are cancelled at the drain timeout."""

import asyncio

from solrl_proto.problems import ProblemKind, RetryLaterError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from solrl_http.problems import respond_to


def draining(
    detail: str = "the service is stopping: it finishes accepted work and refuses new work",
) -> RetryLaterError:
    """The 503 of a service that is stopping."""
    return RetryLaterError(
        ProblemKind.DRAINING,
        detail,
        retry_after=10,
        action="send the same request to another replica, or again after the restart",
    )


class DrainTimeout:
    """Middleware that answers 503 if the server cancels a request, which happens at the drain timeout."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; a stream that has started writes its own end."""
        started = False

        async def observed(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, observed)
        except asyncio.CancelledError:
            if scope["type"] != "http" or started:
                raise
            await respond_to(draining("the drain timeout is over"))(scope, receive, send)
