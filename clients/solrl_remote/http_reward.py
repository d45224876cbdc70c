"""Requests of rewards that another program computes: reward servers and judges."""

import asyncio
import weakref
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from functools import partial
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, TypeVar

import httpx
import torch
from solrl_client.background import result_of, start
from solrl_client.connections import async_http_client
from solrl_client.retries import OnWait, Retries, ignore
from solrl_client.tokens import bearer_token
from solrl_client.transport import HEADERS
from solrl_core.errors import RewardUnavailableError
from solrl_proto.printable import printable

Value = TypeVar("Value")

_KEPT_S = 3.0
"""Seconds of an idle connection until it is closed: less than the five of uvicorn, so that no request is sent
while the server closes its end, which would look like a fault."""


class TemporaryError(RewardUnavailableError):
    """A fault to retry in `after` seconds; None if the server does not say when."""

    def __init__(self, reward: str, fault: str, after: float | None = None) -> None:
        super().__init__(reward, fault)
        self.after = after


class HttpReward(ABC):
    """A reward whose scores another program gives, over connections that are kept.

    Subclasses describe the arguments. `at` is the base address. `token` names the environment variable with the bearer
    token; None sends no token.

    Raises:
        ValueError: the environment's proxy cannot be used.
    """

    def __init__(
        self,
        name: str,
        at: str,
        token: str | None,
        timeout: float,
        patience: float,
        *,
        connections: int | None = None,
        on_wait: OnWait = ignore,
    ) -> None:
        self.at = at
        self.timeout = timeout
        self._name = name
        self._sends_token = token is not None
        self._retries = partial(Retries, patience, server=at, on_wait=on_wait)
        bearer = bearer_token(token) if token else None
        self._http = async_http_client(
            at,
            httpx.Limits(max_connections=connections, keepalive_expiry=_KEPT_S),
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),  # none are kept: callers share this client
            headers=HEADERS | ({"Authorization": f"Bearer {bearer}"} if bearer else {}),
            timeout=httpx.Timeout(None, connect=5.0),
        )
        weakref.finalize(self, _close, self._http).atexit = False

    def __call__(
        self, images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> torch.Tensor:
        """Score images [N, 3, H, W], or clips [N, F, 3, H, W], in [0, 1] or uint8, with N prompts; float32 [N].

        Raises:
            ValueError: the numbers of images and prompts differ.
            RewardError: the reward failed on these images.
            RewardUnavailableError: the server gave no usable answer.
        """
        try:
            return result_of(self.ask(images, prompts, metadata))
        except CancelledError:
            raise self._unavailable("was not asked to the end: nobody waits for it any more") from None

    @abstractmethod
    async def ask(
        self, images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> torch.Tensor:
        """Score as a call does, on the background loop."""

    async def _patiently(self, attempt: Callable[[], Awaitable[Value]]) -> Value:
        """The result of `attempt`, retried with growing pauses after temporary faults."""
        with self._retries() as retries:
            while True:
                try:
                    return await attempt()
                except TemporaryError as error:
                    pause = retries.pause(error.after, str(error))
                    if pause is None:
                        raise
                await asyncio.sleep(pause)

    async def _answer(self, method: str, path: str, limit: int, **arguments: Any) -> httpx.Response:
        """The answer to one request, of any status. No more of its body is read once that exceeds `limit` bytes."""
        body = bytearray()
        try:
            # httpx itself limits only the time between two parts of an answer.
            async with asyncio.timeout(self.timeout), self._http.stream(method, path, **arguments) as answer:
                async for part in answer.aiter_raw():
                    body += part
                    if len(body) > limit:
                        break
        except TimeoutError:
            why = f"ReadTimeout: no complete answer in {self.timeout:g} s"
            if self._sends_token:  # nobody can set it for a run's server
                why += "; raise the reward's option timeout if its server needs longer"
            raise self._temporary(f"gave no answer ({why})") from None
        except (httpx.LocalProtocolError, httpx.UnsupportedProtocol) as error:
            # Its text may contain the token.
            raise self._unavailable(f"cannot be asked ({type(error).__name__})") from None
        except httpx.TransportError as error:
            why = printable(str(error), 400) or "no answer in time"
            raise self._temporary(f"gave no answer ({type(error).__name__}: {why})") from None
        stream = httpx.ByteStream(bytes(body))
        return httpx.Response(answer.status_code, headers=answer.headers, stream=stream, request=answer.request)

    def _temporary(self, fault: str, after: float | None = None) -> TemporaryError:
        return TemporaryError(self._name, f"at {self.at} {fault}", after)

    def _unavailable(self, fault: str) -> RewardUnavailableError:
        return RewardUnavailableError(self._name, f"at {self.at} {fault}")


def _close(http: httpx.AsyncClient) -> None:
    start(http.aclose())
