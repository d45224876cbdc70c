"""OpenAI-compatible endpoints for chat: bounded answers, retries, a rate limit, and a count of what was used."""

import asyncio
import json
import math
from typing import Annotated, Any, TypeVar

import httpx
from aiolimiter import AsyncLimiter
from pydantic import BaseModel, Field, ValidationError
from solrl_client.addresses import check_url
from solrl_client.retries import Retries
from solrl_client.timed_client import TimedClient
from solrl_client.transport import RefusedError, first_invalid_field, read_within
from solrl_core.errors import RewardUnavailableError
from solrl_proto.printable import printable

TOKEN = "SOLRL_JUDGE_TOKEN"
"""Variable of the environment with the endpoint's API key; `TOKEN_PATH`'s file has it, too."""

_REFUSED = {400, 413, 422}
"""Statuses by which an endpoint refuses one request, not its sender."""
_LONGEST_PAUSE = 30.0
_LARGEST = 64 * 2**20
"""Bytes of the largest document: an answer of 6,000 tokens with twenty alternatives each takes about half of it."""

_FAIL_FAST = Field(fail_fast=True)
"""Of a sequence: a fault takes about a kilobyte, so only the first one is kept."""


class TokenChoice(BaseModel):
    """A token, and its log-probability."""

    token: str
    logprob: Annotated[float, Field(le=1e-3)]  # NaN is refused, too


class AnswerToken(TokenChoice):
    """A token of an answer, and the likeliest ones at its place."""

    top_logprobs: Annotated[tuple[TokenChoice, ...], _FAIL_FAST] = ()


class AnswerTokens(BaseModel):
    """Tokens of an answer, if the endpoint gives them."""

    content: Annotated[tuple[AnswerToken, ...], _FAIL_FAST] | None = None


class ChatMessage(BaseModel):
    """Text of an answer."""

    content: str | None = None


class Choice(BaseModel):
    """One answer, and why it ended."""

    message: ChatMessage
    finish_reason: str | None = None
    logprobs: AnswerTokens | None = None


class Spent(BaseModel):
    """Tokens that a request cost."""

    prompt_tokens: Annotated[int, Field(ge=0)] = 0
    completion_tokens: Annotated[int, Field(ge=0)] = 0


class Completion(BaseModel):
    """Document of `POST /chat/completions`."""

    choices: Annotated[tuple[Choice, ...], _FAIL_FAST]
    usage: Spent | None = None


class _Model(BaseModel):
    id: str


class _Models(BaseModel):
    data: Annotated[tuple[_Model, ...], _FAIL_FAST]


Document = TypeVar("Document", bound=BaseModel)


class RequestRefusedError(ValueError):
    """The endpoint refuses this request, whoever sends it: perhaps its image is too large."""


class _TemporaryError(Exception):
    """A fault that may be gone `after` seconds from now; `limited` if the endpoint takes no requests until then."""

    def __init__(self, fault: str, after: float = 0.0, *, limited: bool = False) -> None:
        super().__init__(fault)
        self.after = after
        self.limited = limited


class ChatEndpoint:
    """Sends requests to an OpenAI-compatible endpoint, on the background loop.

    Args:
        reward: name of the reward, in errors.
        address: address to which `/chat/completions` is appended.
        timeout: seconds within which an answer must be complete.
        patience: seconds for which a request is repeated after temporary faults, with growing pauses.
        in_flight: most open connections.
        per_second: most requests in a second; None for no limit.

    Attributes:
        address: the address, without a trailing slash.
        costs: requests sent, and tokens that the endpoint says were used, since the start.

    Raises:
        ValueError: an option is invalid.
    """

    def __init__(
        self,
        reward: str,
        address: str,
        *,
        timeout: float,
        patience: float,
        in_flight: int,
        per_second: float | None,
    ) -> None:
        if not (timeout > 0 and patience >= 0 and in_flight >= 1 and (per_second is None or per_second > 0)):
            raise ValueError(
                f"got timeout {timeout}, patience {patience}, in_flight {in_flight} and per_second {per_second}; "
                "expected timeout and per_second above 0, patience of at least 0, and in_flight of at least 1"
            )
        self.address = check_url(address, "endpoint of the judge", TOKEN)
        self._reward = reward
        self._timeout = timeout
        self._patience = patience
        self._pace = AsyncLimiter(1, 1 / per_second) if per_second else None
        self._held_until = 0.0
        """Time of the loop before which the endpoint takes no requests."""
        self._http = TimedClient(self.address, TOKEN, timeout, in_flight)
        self.costs = {"requests": 0, "prompt_tokens": 0, "completion_tokens": 0}

    async def models(self) -> tuple[str, ...]:
        """Names of the endpoint's models.

        Raises:
            RewardUnavailableError: it does not say.
        """
        try:
            listed = await self._attempt(_Models, "GET", "/models")
        except (_TemporaryError, RequestRefusedError) as error:
            raise self.unavailable(str(error)) from None
        return tuple(model.id for model in listed.data)

    async def complete(self, request: bytes) -> Completion:
        """Answer to a request, a JSON document, which is repeated after temporary faults.

        Raises:
            RequestRefusedError: the endpoint refuses this request.
            RewardUnavailableError: it gives no usable answer.
        """
        headers = {"Content-Type": "application/json"}
        retries = Retries(self._patience, longest=_LONGEST_PAUSE)
        while True:
            await self._turn()
            self.costs["requests"] += 1
            try:
                found = await self._attempt(Completion, "POST", "/chat/completions", content=request, headers=headers)
                break
            except _TemporaryError as error:
                tries = f", {retries.tries} times in {retries.elapsed:.0f} s" if retries.tries > 1 else ""
                pause = retries.pause(error.after)
                if pause is None:
                    raise self.unavailable(f"{error}{tries}") from None
                if error.limited:
                    self._held_until = max(self._held_until, asyncio.get_running_loop().time() + pause)
            await asyncio.sleep(pause)
        for kind, number in (found.usage or Spent()).model_dump().items():
            self.costs[kind] += number
        return found

    def unavailable(self, fault: str) -> RewardUnavailableError:
        """The error for a fault of the endpoint."""
        return RewardUnavailableError(self._reward, f"at {self.address} {fault}")

    async def _turn(self) -> None:
        """Wait until the endpoint takes requests again, and for this one's place among them."""
        await asyncio.sleep(self._held_until - asyncio.get_running_loop().time())
        if self._pace is not None:
            await self._pace.acquire()

    async def _attempt(self, model: type[Document], method: str, path: str, **arguments: Any) -> Document:
        """The document of one request."""
        try:
            answer = await self._http.ask(method, path, _LARGEST, **arguments)
            body = read_within(answer, _LARGEST)
        except (httpx.LocalProtocolError, httpx.UnsupportedProtocol) as error:
            # Its text may contain the token.
            raise self.unavailable(f"cannot be asked ({type(error).__name__})") from None
        except httpx.TransportError as error:
            why = printable(str(error), 400) or f"no answer within {self._timeout:g} s"
            raise _TemporaryError(f"gave no answer ({type(error).__name__}: {why})") from None
        except RefusedError as error:
            raise self.unavailable(f"gave an answer that cannot be read: {error.problem.detail}") from None
        if body is None:
            raise self.unavailable(f"answered {answer.status_code} to {path} with more than {_LARGEST} bytes")
        if not answer.is_success:
            raise self._refusal(answer, path, _message(body))
        try:
            return model.model_validate_json(body)
        except ValidationError as error:
            got = printable(body.decode(errors="replace"), 200)
            fault = printable(first_invalid_field(error), 400)
            raise self.unavailable(
                f"did not answer as {path} of OpenAI's interface ({fault}): got {got!r}; check the address"
            ) from None

    def _refusal(self, answer: httpx.Response, path: str, message: str) -> Exception:
        """The error for a status that is no success."""
        status = answer.status_code
        fault = f"answered {status} to {path}: {message}"
        if status in (408, 429) or status >= 500:
            return _TemporaryError(fault, _retry_after(answer), limited=status == 429)
        if status in _REFUSED:
            return RequestRefusedError(f"at {self.address} {fault}")
        if status in (401, 403):
            fault += f"; give the API key in {TOKEN}, or in {TOKEN}_PATH's file"
        elif status == 404:
            fault += (
                "; expected an address that /models and /chat/completions can be appended to, such as http://HOST/v1"
            )
        return self.unavailable(fault)


def _message(body: bytes) -> str:
    """The message of an error in OpenAI's form, or the beginning of another body; safe to print."""
    try:
        error = json.loads(body)["error"]
        text = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError, RecursionError):
        text = body.decode(errors="replace")
    return printable(text, 400)


def _retry_after(answer: httpx.Response) -> float:
    """Seconds in the header Retry-After; 0 without it, and for a date."""
    try:
        seconds = float(answer.headers.get("Retry-After", "0"))
    except ValueError:
        return 0.0
    return seconds if math.isfinite(seconds) and seconds > 0 else 0.0
