"""New work is refused from its head alone where nothing could be taken in: refusing must cost less than serving."""

from solrl_proto.problems import ProblemError
from starlette.types import ASGIApp, Receive, Scope, Send

from solrl_rollout.http.problems import respond_to
from solrl_rollout.service import Service

_QUEUED = ("POST /v1/rollouts",)
"""Rules of `solrl_rollout.http.access` whose requests wait for the engine."""


class RefuseWhenFull:
    """Middleware behind access control that reads no body while not one candidate more of its caller may wait."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer why nothing new is taken."""
        if scope["type"] == "http" and scope["state"]["rule"] in _QUEUED:
            service: Service = scope["app"].state.service
            try:
                service.require_room(scope["state"]["caller"])
            except ProblemError as error:
                await respond_to(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)
