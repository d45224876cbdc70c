"""Origin and host checks: other sites' pages must not use a browser's access to the service."""

import ipaddress
import re
from collections.abc import Collection

from solrl_proto.problems import Problem, ProblemKind
from starlette.types import ASGIApp, Receive, Scope, Send

from solrl_http.problems import respond

_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


def is_loopback(host: str) -> bool:
    """Whether a listening address is reachable only from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class SiteGuard:
    """Middleware that refuses requests that other sites' pages send through a browser.

    Browsers name the page's site in `Origin` when it sends data or reads answers across sites. On a service without
    tokens, `Host` must also be loopback or allowed: a site can resolve one of its names to this machine (DNS
    rebinding), and then its pages have the service's origin.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str] | None) -> None:
        """`hosts`: names and addresses allowed in addition to loopback; None if callers need tokens."""
        self._app = app
        self._hosts = None if hosts is None else {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 403."""
        if scope["type"] == "http":
            problem = self._check(scope)
            if problem is not None:
                await respond(problem)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> Problem | None:
        sent = [(name, value.decode("latin-1")) for name, value in scope["headers"] if name in (b"host", b"origin")]
        hosts = [value for name, value in sent if name == b"host"]
        # HTTP/1.0 clients may omit Host; browsers do not.
        if self._hosts is not None and not all(self._allows(host) for host in hosts):
            return _foreign_host(hosts[0])
        origins = [value for name, value in sent if name == b"origin"]
        if origins and not (len(origins) == len(hosts) == 1 and _is_own(origins[0], hosts[0])):
            return _foreign_origin(origins[0])
        return None

    def _allows(self, host: str) -> bool:
        name = re.sub(r":\d*$", "", host.lower()).rstrip(".").strip("[]")
        return is_loopback(name) or name.endswith(".localhost") or name in (self._hosts or ())


def _is_own(origin: str, host: str) -> bool:
    scheme, separator, site = origin.lower().partition("://")
    port = _DEFAULT_PORTS.get(scheme)
    # TLS ends at a proxy, so the scheme may differ from the service's own.
    return bool(separator) and port is not None and site.removesuffix(port) == host.lower().removesuffix(port)


def _foreign_host(host: str) -> Problem:
    return ProblemKind.HOST_NOT_LOCAL.problem(
        "this service has no tokens, and answers only requests to its known host names",
        where="header.Host",
        got=host[:200],
        expected="a loopback name or address, or an allowed host",
        action="add it to --allowed-hosts (SOLRL_ALLOWED_HOSTS), or start the service with --token-file",
    )


def _foreign_origin(origin: str) -> Problem:
    return ProblemKind.FOREIGN_ORIGIN.problem(
        "a page of another site sent this request",
        where="header.Origin",
        got=origin[:200],
        expected="the service's own origin, or no Origin header",
        action="send the request from a program instead; a proxy in front of the service must forward Host unchanged",
    )
