"""A time limit for a whole request. httpx itself limits only the time between two parts of it."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from http.cookiejar import CookieJar, DefaultCookiePolicy
from types import TracebackType
from typing import Any, Self

import httpx

from solrl_client.cancellation import current
from solrl_client.tokens import bearer_token
from solrl_client.transport import HEADERS

_CONNECTED = (".connect_tcp.complete", ".start_tls.complete")


class Deadline:
    """Shuts the connection of a request down after some seconds, or by `end`.

    Within the context, the request is sent with `extensions`, by a client that keeps no connection: httpcore names a
    connection only when it is made.

    Args:
        seconds: from entering the context.

    Raises:
        httpx.ReadTimeout: at the end of the context, in place of the error that the shutdown caused.
    """

    def __init__(self, seconds: float) -> None:
        self.extensions = {"trace": self._note}
        self._seconds = seconds
        self._passed = False
        self._connection: socket.socket | None = None
        self._timer = threading.Timer(seconds, self.end)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self._passed and isinstance(error, Exception):
            raise httpx.ReadTimeout(f"no complete answer in {self._seconds:g} s") from error

    def _note(self, event: str, info: dict[str, Any]) -> None:
        if event.endswith(_CONNECTED):
            self._connection = info["return_value"].get_extra_info("socket")
            if self._passed:  # while it connected
                self.end()

    def end(self) -> None:
        """End the request now. Any thread."""
        self._passed = True
        if self._connection is not None:
            with contextlib.suppress(OSError):  # it is closed by now
                # The method of plain sockets: that of TLS would drop its state under a reading thread.
                socket.socket.shutdown(self._connection, socket.SHUT_RDWR)


class TimedClient:
    """HTTP requests to one address, each with a time limit for its whole answer. `Cancellation.set` ends them.

    Args:
        address: address to which paths are appended.
        token: variable of the environment with the bearer token; None to send none.
        timeout: seconds within which an answer must be complete.
        connections: most open connections; None for no limit.
    """

    def __init__(self, address: str, token: str | None, timeout: float, connections: int | None = None) -> None:
        given = bearer_token(token) if token else None
        self._timeout = timeout
        self._http = httpx.Client(
            base_url=address,
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),  # none are kept: callers share this client
            headers=HEADERS | ({"Authorization": f"Bearer {given}"} if given else {}),
            timeout=httpx.Timeout(timeout, connect=min(timeout, 5.0)),
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=0),  # see `Deadline`
        )

    @contextlib.contextmanager
    def stream(self, method: str, path: str, **arguments: Any) -> Iterator[httpx.Response]:
        """The answer to a request, not yet read; raises httpx.TransportError also when it is late or cancelled."""
        with (
            Deadline(self._timeout) as deadline,
            current().calling(deadline.end),
            self._http.stream(method, path, extensions=deadline.extensions, **arguments) as answer,
        ):
            yield answer
