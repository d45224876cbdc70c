"""HTTP clients of one address each, and the environment's proxy that they connect through, if any.

httpx would choose it for each request, and would send requests of this machine to itself, with their tokens, to the
proxy unless `no_proxy` lists this machine in a spelling that httpx knows.
"""

import ipaddress
import re
import socket
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies

import httpx

_PORTS = {"http": 80, "https": 443}
_THIS_MACHINE = ("localhost", "127.0.0.0/8", "::1", "0.0.0.0", "::")

Transport = TypeVar("Transport", httpx.HTTPTransport, httpx.AsyncHTTPTransport)
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def http_client(address: str, **options: Any) -> httpx.Client:
    """A client of one address, with the options of `httpx.Client`.

    Raises:
        ValueError: the environment's proxy cannot be used.
    """
    return httpx.Client(base_url=address, transport=_transport(httpx.HTTPTransport, address), **options)


def async_http_client(address: str, limits: httpx.Limits, **options: Any) -> httpx.AsyncClient:
    """As `http_client`, for requests of an event loop."""
    transport = _transport(httpx.AsyncHTTPTransport, address, limits=limits)
    return httpx.AsyncClient(base_url=address, transport=transport, **options)


def proxy_for(address: str) -> str | None:
    """URL of the environment's proxy for a service at this address; None to connect to it directly.

    A service of this machine never has one. `no_proxy` lists hosts, with their subdomains, addresses and networks, each
    perhaps with a port, or has `*`.
    """
    parts, proxies = urlsplit(address), getproxies()
    host = (parts.hostname or "").rstrip(".")
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    port = parts.port or _PORTS.get(parts.scheme)
    exceptions = (*_THIS_MACHINE, *re.split(r"[,\s]+", proxies.get("no", "").lower()))
    if not proxy or any(_names(entry, host, port) for entry in exceptions):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _transport(kind: Callable[..., Transport], address: str, **options: Any) -> Transport:
    """A transport to an address, which overrides the proxies that httpx would choose."""
    proxy = proxy_for(address)
    if proxy is None:
        return kind(**options)
    try:
        return kind(proxy=httpx.Proxy(proxy), **options)
    except (ImportError, ValueError, httpx.InvalidURL) as error:
        package = " and the package socksio (pip install 'httpx[socks]')" if isinstance(error, ImportError) else ""
        raise ValueError(
            f"the environment's proxy for {address} cannot be used: got one of the kind {proxy.partition('://')[0]!r}; "
            f"expected http://HOST:PORT, or socks5://HOST:PORT{package}; change the variable "
            f"{urlsplit(address).scheme}_proxy or all_proxy, or list the host in no_proxy"
        ) from None


def _names(entry: str, host: str, port: int | None) -> bool:
    """Whether an entry of `no_proxy` names this host and port."""
    name = re.sub(rf"^(\[.*\]|[^:]*):{port}$", r"\1", entry).strip("[]")
    if address := _address(host):
        try:
            return name == "*" or address in ipaddress.ip_network(name, strict=False)
        except ValueError:
            return False
    suffix = name.removeprefix("*").strip(".")
    return name == "*" or (suffix != "" and f".{host}".endswith(f".{suffix}"))


def _address(host: str) -> Address | None:
    """The address that a host is, also in the short forms of IPv4 such as 127.1; None if it is a name."""
    try:
        address: Address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        try:
            return ipaddress.IPv4Address(socket.inet_aton(host))
        except OSError:
            return None
    return getattr(address, "ipv4_mapped", None) or address
