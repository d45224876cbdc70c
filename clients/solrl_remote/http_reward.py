"""Requests of rewards that another program computes: reward servers and judges."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from typing import Any, TypeVar

import httpx
import torch
from solrl_client.background import result_of
from solrl_client.retries import OnWait, Retries, ignore
from solrl_client.timed_client import TimedClient
from solrl_core.errors import RewardUnavailableError
from solrl_proto.printable import printable

Value = TypeVar("Value")


class TemporaryError(RewardUnavailableError):
    """A fault that may be gone `after` seconds from now; None if the server does not say when."""

    def __init__(self, reward: str, fault: str, after: float | None = None) -> None:
        super().__init__(reward, fault)
        self.after = after


class HttpReward(ABC):
    """A reward whose scores another program gives.

    Args:
        name: the reward's name, for errors.
        at: address of the program.
        token: variable of the environment with the bearer token; None to send none.
        timeout: seconds within which an answer must be complete.
        patience: seconds for which a request is repeated after temporary faults, with growing pauses.
        pause: seconds before the first retry.
        connections: most open connections; None for no limit.
        on_wait: told of each pause before a retry.
    """

    def __init__(
        self,
        name: str,
        at: str,
        token: str | None,
        timeout: float,
        patience: float,
        *,
        pause: float = 0.5,
        connections: int | None = None,
        on_wait: OnWait = ignore,
    ) -> None:
        self.at = at
        self._name = name
        self._patience = patience
        self._pause = pause
        self._on_wait = on_wait
        self._sends_token = token is not None
        self._http = TimedClient(at, token, timeout, connections)

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
        with Retries(self._patience, self._pause, server=self.at, on_wait=self._on_wait) as retries:
            while True:
                try:
                    return await attempt()
                except TemporaryError as error:
                    pause = retries.pause(error.after, str(error))
                    if pause is None:
                        raise
                await asyncio.sleep(pause)

    async def _answer(self, method: str, path: str, limit: int, **arguments: Any) -> httpx.Response:
        """The answer to one request, of any status, with at most a little more than `limit` bytes of its body."""
        try:
            return await self._http.ask(method, path, limit, **arguments)
        except (httpx.LocalProtocolError, httpx.UnsupportedProtocol) as error:
            # Its text may contain the token.
            raise self._unavailable(f"cannot be asked ({type(error).__name__})") from None
        except httpx.TransportError as error:
            why = printable(str(error), 400) or "no answer in time"
            if isinstance(error, httpx.ReadTimeout) and self._sends_token:  # nobody can set it for a run's server
                why += "; raise the reward's option timeout if its server needs longer"
            raise self._temporary(f"gave no answer ({type(error).__name__}: {why})") from None

    def _temporary(self, fault: str, after: float | None = None) -> TemporaryError:
        return TemporaryError(self._name, f"at {self.at} {fault}", after)

    def _unavailable(self, fault: str) -> RewardUnavailableError:
        return RewardUnavailableError(self._name, f"at {self.at} {fault}")
