"""Host check of a service without tokens: protection from DNS rebinding."""

import ipaddress
import re

from solrl_proto.problems import Problem, ProblemKind
from starlette.types import ASGIApp, Receive, Scope, Send

from solrl_rollout.http.problems import respond


def is_loopback(host: str) -> bool:
    """Whether a listening address is reachable only from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class NoForeignNames:
    """Middleware for a service without tokens that refuses foreign host names.

    A website can resolve one of its names to this machine (DNS rebinding); a browser then lets the site's pages read
    the service's answers. Such a name contains a dot. Addresses and short names of the local network cannot be abused.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 403."""
        if scope["type"] == "http":
            host = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), "")
            if _is_foreign(host):
                await respond(_foreign_host(host))(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _is_foreign(host: str) -> bool:
    name = host.lower().rstrip(".").rpartition(":")[0] if re.search(r":\d*$", host) else host.lower().rstrip(".")
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return "." in name and not name.endswith(".localhost")
    return False


def _foreign_host(host: str) -> Problem:
    return ProblemKind.HOST_NOT_LOCAL.problem(
        "this service runs without tokens and serves only its own machine",
        where="header.Host",
        got=host[:200],
        expected="localhost or an address",
        action="start the service with a token file (--token-file) to reach it under another name",
    )
