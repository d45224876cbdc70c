"""The outermost layer: gives each request an id, logs it once it is answered, and counts it."""

import json
import logging
import re
import secrets
import time

from solrl_proto.identifiers import NAME_PATTERN
from solrl_proto.problems import PROBLEM_MEDIA_TYPE
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from solrl_rollout.status import logs
from solrl_rollout.status.metrics import Telemetry

logger = logging.getLogger(__name__)

REQUEST_ID_HEADER = "X-Request-ID"
_WELL_FORMED = re.compile(r"[A-Za-z0-9._-]{1,64}")
_RUN = re.compile(r"/v1/runs/([^/]+)")
_QUIET = ("/health/", "/metrics", "/v1/status")  # asked every few seconds by probes and pages
_CLIENT_LEFT = 499


class Observed:
    """Middleware around everything else, so that no answer leaves without its id and its line."""

    def __init__(self, app: ASGIApp, telemetry: Telemetry) -> None:
        self._app = app
        self._telemetry = telemetry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on and watch what is answered."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        fields = logs.begin(request_id)
        scope.setdefault("state", {})["request_id"] = request_id
        status, is_problem, started = 0, False, time.perf_counter()

        async def watched(message: Message) -> None:
            nonlocal status, is_problem
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", ()), (REQUEST_ID_HEADER.lower().encode(), request_id.encode())]
                is_problem = (b"content-type", PROBLEM_MEDIA_TYPE.encode()) in headers
                message = {**message, "headers": headers}
            elif is_problem:
                fields.update(_problem(message.get("body", b"")))
            await send(message)

        with self._telemetry.in_progress():
            try:
                await self._app(scope, receive, watched)
            finally:
                self._done(scope, status or _CLIENT_LEFT, time.perf_counter() - started)

    def _done(self, scope: Scope, status: int, seconds: float) -> None:
        state = scope["state"]
        method, _, route = (state.get("rule") or "").partition(" ")
        self._telemetry.request(route or "unmatched", method or "other", status, seconds)
        path: str = scope["path"]
        run = _RUN.match(path)
        caller = state.get("caller")
        logs.note(
            tenant=caller and caller.tenant,
            token=caller and caller.token,
            run=run[1] if run and re.fullmatch(NAME_PATTERN, run[1]) else None,
        )
        fields = {"status": status, "seconds": round(seconds, 4)}
        if scope.get("client"):
            fields["client"] = scope["client"][0]
        quiet = status < 400 and path.startswith(_QUIET)
        said = {"fields": {"method": scope["method"], "route": route or None, **fields}}
        logger.log(logging.DEBUG if quiet else logging.INFO, "%s %s", scope["method"], path[:200], extra=said)


def _request_id(scope: Scope) -> str:
    wanted = REQUEST_ID_HEADER.lower().encode()
    given = next((value.decode("latin-1") for name, value in scope["headers"] if name == wanted), "")
    return given if _WELL_FORMED.fullmatch(given) else secrets.token_hex(8)


def _problem(body: bytes) -> dict[str, str]:
    try:
        document = json.loads(body)
        return {"problem": document["type"].rpartition(":")[2], "detail": document["detail"][:500]}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}
