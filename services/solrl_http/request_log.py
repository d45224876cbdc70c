"""The request log: an id for each request; a log line and a metric for each answer."""

import asyncio
import logging
import re
import secrets
import time

from solrl_proto.identifiers import NAME_PATTERN
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from solrl_http import logs
from solrl_http.problem_responses import draining, respond_to
from solrl_http.request_metrics import RequestMetrics

logger = logging.getLogger(__name__)

REQUEST_ID_HEADER = "X-Request-ID"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_RUN = re.compile(r"/v1/runs/([^/]+)")
_QUIET = ("/health/", "/metrics", "/v1/status")  # polled every few seconds by probes and pages
_CLIENT_LEFT = 499


class RequestLog:
    """The outermost middleware, so that every answer has an id and a line.

    It also answers 503 if the server cancels a request, which happens at the drain timeout.
    """

    def __init__(self, app: ASGIApp, metrics: RequestMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        logs.begin_request(request_id)
        scope.setdefault("state", {})["request_id"] = request_id
        status, started_at = 0, time.perf_counter()

        async def observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", ()), (REQUEST_ID_HEADER.lower().encode(), request_id.encode())]
                message = {**message, "headers": headers}
            await send(message)

        with self._metrics.open.track_inprogress():
            try:
                await self._app(scope, receive, observed)
            except asyncio.CancelledError:
                if status:  # a stream that has started writes its own end
                    raise
                await respond_to(draining("the drain timeout is over"))(scope, receive, observed)
            finally:
                self._log(scope, status or _CLIENT_LEFT, time.perf_counter() - started_at)

    def _log(self, scope: Scope, status: int, seconds: float) -> None:
        state = scope["state"]
        rule, caller = state.get("rule"), state.get("caller")
        route = rule.path if rule else None
        self._metrics.request_answered(route or "unmatched", rule.method if rule else "other", status, seconds)
        path: str = scope["path"]
        run = _RUN.match(path)
        logs.add_fields(
            tenant=caller and caller.tenant,
            token=caller and caller.token,
            run=run[1] if run and re.fullmatch(NAME_PATTERN, run[1]) else None,
        )
        fields = {"method": scope["method"], "route": route, "status": status, "seconds": round(seconds, 4)}
        if scope.get("client"):
            fields["client"] = scope["client"][0]
        level = logging.WARNING if status >= 500 else logging.INFO
        if status < 400 and path.startswith(_QUIET):
            level = logging.DEBUG
        logger.log(level, "%s %s", scope["method"], path[:200], extra={"fields": fields})


def _request_id(scope: Scope) -> str:
    """The client's id if it is well-formed, otherwise a new one."""
    header = REQUEST_ID_HEADER.lower().encode()
    request_id = next((value.decode("latin-1") for name, value in scope["headers"] if name == header), "")
    return request_id if _REQUEST_ID.fullmatch(request_id) else secrets.token_hex(8)
