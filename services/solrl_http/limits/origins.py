"""Origin and host checks: other sites' pages must not use a browser's access to the service."""

import ipaddress
import re
from collections.abc import Collection

from solrl_proto.problems import ProblemKind
from starlette.types import Scope

from solrl_http.problem_responses import Refusal

_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


def is_loopback(host: str) -> bool:
    """Whether a listening address is reachable only from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def require_own_site(scope: Scope, allowed: Collection[str] | None) -> None:
    """Refuse a request that another site's page sends through a browser.

    Browsers name the page's site in `Origin` when it sends data or reads answers across sites. On a service without
    tokens, `Host` must also be loopback or allowed. Otherwise, a site could resolve its name to this machine (DNS
    rebinding) and share the service's origin.

    Args:
        allowed: names and addresses, in lower case, in addition to loopback; None if callers need tokens.

    Raises:
        Refusal: 403 `host-not-local` or `foreign-origin`.
    """
    hosts, origins = (
        [value.decode("latin-1") for name, value in scope["headers"] if name == header]
        for header in (b"host", b"origin")
    )
    # HTTP/1.0 clients may omit Host; browsers do not.
    if allowed is not None and not all(_is_known(host, allowed) for host in hosts):
        raise Refusal(
            ProblemKind.HOST_NOT_LOCAL,
            "this service has no tokens, and answers only requests to its known host names",
            where="header.Host",
            got=hosts[0][:200],
            expected="a loopback name or address, or an allowed host",
            action="add it to --allowed-hosts (SOLRL_ALLOWED_HOSTS), or start the service with --token-file",
        )
    if origins and not (len(origins) == len(hosts) == 1 and _is_own(origins[0], hosts[0])):
        raise Refusal(
            ProblemKind.FOREIGN_ORIGIN,
            "a page of another site sent this request",
            where="header.Origin",
            got=origins[0][:200],
            expected="the service's own origin, or no Origin header",
            action="send the request from a program instead; a proxy in front of the service must forward Host "
            "unchanged",
        )


def _is_known(host: str, allowed: Collection[str]) -> bool:
    name = re.sub(r":\d*$", "", host.lower()).rstrip(".").strip("[]")
    return is_loopback(name) or name.endswith(".localhost") or name in allowed


def _is_own(origin: str, host: str) -> bool:
    scheme, separator, site = origin.lower().partition("://")
    port = _DEFAULT_PORTS.get(scheme)
    # TLS ends at a proxy, so the scheme may differ from the service's own.
    return bool(separator) and port is not None and site.removesuffix(port) == host.lower().removesuffix(port)
