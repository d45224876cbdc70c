"""Requests with a time limit for the whole answer. httpx itself limits only the time between two parts of it."""

import asyncio
import weakref
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any

import httpx

from solrl_client.background import loop
from solrl_client.connections import async_http_client
from solrl_client.tokens import bearer_token
from solrl_client.transport import HEADERS

_KEPT_S = 3.0
"""Seconds of an idle connection until it is closed: less than the five of uvicorn, so that no request is sent
while the server closes its end, which would look like a fault."""


class TimedClient:
    """HTTP requests to one address, each with a time limit for its whole answer, over kept-alive connections.

    Args:
        address: base address, such as http://127.0.0.1:8000/v1; paths are appended to it.
        token: variable of the environment with the bearer token; None to send none.
        timeout: most seconds until an answer is complete.
        connections: most open connections; None for no limit.

    Attributes:
        timeout: as given; may be changed.

    Raises:
        ValueError: the environment's proxy cannot be used.
    """

    def __init__(self, address: str, token: str | None, timeout: float, connections: int | None = None) -> None:
        bearer = bearer_token(token) if token else None
        self.timeout = timeout
        self._http = async_http_client(
            address,
            httpx.Limits(max_connections=connections, keepalive_expiry=_KEPT_S),
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),  # none are kept: callers share this client
            headers=HEADERS | ({"Authorization": f"Bearer {bearer}"} if bearer else {}),
            timeout=httpx.Timeout(None, connect=5.0),
        )
        weakref.finalize(self, _close, self._http).atexit = False

    async def ask(self, method: str, path: str, limit: int, **arguments: Any) -> httpx.Response:
        """The answer to a request, with its body as it was sent. Only on the background loop.

        No more of a body is read once it exceeds `limit` bytes.

        Raises:
            httpx.TransportError: there is no answer, or it is late.
        """
        body = bytearray()
        try:
            async with asyncio.timeout(self.timeout), self._http.stream(method, path, **arguments) as answer:
                async for part in answer.aiter_raw():
                    body += part
                    if len(body) > limit:
                        break
        except TimeoutError:
            raise httpx.ReadTimeout(f"no complete answer in {self.timeout:g} s") from None
        stream = httpx.ByteStream(bytes(body))
        return httpx.Response(answer.status_code, headers=answer.headers, stream=stream, request=answer.request)


def _close(http: httpx.AsyncClient) -> None:
    asyncio.run_coroutine_threadsafe(http.aclose(), loop())
