"""A vision language model as a judge, asked at an OpenAI-compatible endpoint.

`HttpReward` replaces the `openai` package here: it limits an answer's bytes, keeps secrets out of errors and logs, and
shares the proxy rules and retries of solrl's other clients.
"""

import asyncio
import base64
import hashlib
import io
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

import httpx
import torch
from aiolimiter import AsyncLimiter
from PIL import Image
from pydantic import BaseModel, Field, ValidationError
from solrl_client.addresses import check_url
from solrl_client.background import result_of
from solrl_client.transport import Document, RefusedError, first_invalid_field, read_within, retry_after
from solrl_core.errors import RewardError
from solrl_core.fingerprint import combined_digest, source_digest
from solrl_core.rewards.images import as_pil
from solrl_proto.printable import printable
from solrl_proto.secrets import without_secrets

from solrl_remote.http_reward import HttpReward
from solrl_remote.judgement import Scale, TokenLogprobs

NAME = "vlm_judge"
TOKEN = "SOLRL_JUDGE_TOKEN"
"""Variable of the environment with the endpoint's API key; `TOKEN_PATH`'s file has it, too."""
TEMPLATE = (
    "The image was generated from this caption:\n{prompt}\n\n"
    "How well does it show what the caption describes, and how good does it look? Answer with one whole number from "
    "{lowest} (worst) to {highest} (best), and nothing else."
)
_REMEMBERED = 4096
"""Scores that are kept, so that a call repeated after a fault costs nothing twice."""
_REFUSED = {400, 413, 422}
"""Statuses of an endpoint that refuse one request, not its sender."""
_RESERVED_FIELDS = {"model", "messages", "temperature", "logprobs", "top_logprobs", "n", "stream"}
"""Fields of a request that an extra body cannot give, nor the limit of tokens."""

TokenLimit = Literal["max_tokens", "max_completion_tokens"]

ALTERNATIVES = 20
"""Log-probabilities that are asked for at each token."""
MOST_CHOICES = 8
"""Answers that are counted, in an error; one was asked for."""
MODELS_BYTES = 2 * 2**20
"""Most bytes of the list of models: providers have some thousand."""
_FORM_BYTES, _TOKEN_BYTES = 2**15, 4288
"""Most bytes of an answer without tokens, or of a refusal; and of each token with its log-probabilities."""


class _TokenChoice(BaseModel):
    token: str
    logprob: Annotated[float, Field(le=1e-3)]  # NaN is refused, too


class _AnswerToken(_TokenChoice):
    top_logprobs: Annotated[tuple[_TokenChoice, ...], Field(max_length=2 * ALTERNATIVES, fail_fast=True)] = ()


class _AnswerTokens(BaseModel):
    content: Annotated[tuple[_AnswerToken, ...], Field(fail_fast=True)] | None = None


class _Message(BaseModel):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Choice(BaseModel):
    """One answer to a question."""

    message: _Message
    finish_reason: str | None = None
    logprobs: _AnswerTokens | None = None

    @property
    def thoughts(self) -> str:
        """Reasoning that the endpoint has taken out of the answer's text."""
        return self.message.reasoning_content or self.message.reasoning or ""


class Usage(BaseModel):
    """Tokens that a request took."""

    prompt_tokens: Annotated[int, Field(ge=0)] = 0
    completion_tokens: Annotated[int, Field(ge=0)] = 0


class Completion(BaseModel):
    """Answer of `/chat/completions`."""

    choices: Annotated[tuple[Choice, ...], Field(max_length=MOST_CHOICES, fail_fast=True)]
    usage: Usage | None = None


class _Model(BaseModel):
    id: str


class Models(BaseModel):
    """Answer of `/models`."""

    data: Annotated[tuple[_Model, ...], Field(max_length=10_000, fail_fast=True)]


class VlmJudge(HttpReward):
    """Scores that a vision language model gives to images and their prompts.

    Each request asks about one image. The score is the number in the answer. On a scale within 0 to 9, it is the mean
    of the whole numbers, weighted by probability, if the endpoint gives log-probabilities.

    Args:
        endpoint: base address, such as http://127.0.0.1:8000/v1; `/chat/completions` is appended to it.
        model: the model's name there.
        template: question about an image; `{prompt}` stands for its prompt, `{lowest}` and `{highest}` for the range.
        label: text in front of the score in an answer; without it, an answer must be a number alone.
        lowest, highest: range of the scores.
        max_tokens: most tokens of an answer, its reasoning included; an answer that is cut there is an error.
        token_limit: the endpoint's name for `max_tokens`; newer OpenAI models take only max_completion_tokens.
        temperature: 0 for the likeliest answer; None to send none, for models that refuse it.
        extra_body: further fields of a request, such as {"reasoning_effort": "minimal"}.
        logprobs: whether to ask for log-probabilities, which some endpoints refuse.
        timeout: most seconds until an answer is complete.
        patience: seconds to repeat a request after temporary faults, with growing pauses.
        in_flight: most requests at a time.
        per_second: most requests in a second; None for no limit.
        device: ignored; the endpoint has its own.

    Attributes:
        at: address of the endpoint, without a trailing slash.
        costs: requests sent, and used tokens as the endpoint counts them, since the start.
        max_latency_s: most seconds until a question is answered, or fails.
        digest: digest of the model's name, the question, and the code that reads answers.

    Raises:
        ValueError: an option is invalid, or the endpoint does not have the model.
        RewardUnavailableError: the endpoint gives no usable answer.
    """

    parameters = 0
    """Parameters on this machine, for memory plans."""

    def __init__(
        self,
        endpoint: str,
        model: str,
        *,
        template: str = TEMPLATE,
        label: str = "",
        lowest: float = 1,
        highest: float = 5,
        max_tokens: int = 16,
        token_limit: TokenLimit = "max_tokens",
        temperature: float | None = 0,
        extra_body: Mapping[str, Any] | None = None,
        logprobs: bool = True,
        timeout: float = 60.0,
        patience: float = 120.0,
        in_flight: int = 16,
        per_second: float | None = None,
        device: str = "cpu",
    ) -> None:
        if "{prompt}" not in template:
            raise ValueError(f"got template {template!r}; expected {{prompt}} where the prompt belongs")
        if max_tokens < 1:
            raise ValueError(f"got max_tokens {max_tokens}; expected at least 1")
        if token_limit not in get_args(TokenLimit):
            raise ValueError(f"got token_limit {token_limit!r}; expected one of {list(get_args(TokenLimit))}")
        if reserved := sorted({*_RESERVED_FIELDS, *get_args(TokenLimit)} & set(extra_body or {})):
            raise ValueError(f"got {reserved} in extra_body; expected other fields: the judge's options give these")
        if not (timeout > 0 and patience >= 0 and in_flight >= 1 and (per_second is None or per_second > 0)):
            raise ValueError(
                f"got timeout {timeout}, patience {patience}, in_flight {in_flight} and per_second {per_second}; "
                "expected timeout and per_second above 0, patience of at least 0, and in_flight of at least 1"
            )
        self._scale = Scale(lowest, highest, label)
        self._template = template.replace("{lowest}", f"{lowest:g}").replace("{highest}", f"{highest:g}")
        self._max_tokens = max_tokens
        self._settings: dict[str, Any] = {"model": model, token_limit: max_tokens, **(extra_body or {})}
        if temperature is not None:
            self._settings["temperature"] = temperature
        if logprobs:
            self._settings |= {"logprobs": True, "top_logprobs": ALTERNATIVES}
        form = json.dumps([self._settings, self._template, label, lowest, highest], sort_keys=True)
        self.digest = combined_digest(NAME, form, source_digest(Scale))
        at = check_url(endpoint, "endpoint of the judge", TOKEN)
        super().__init__(NAME, at, TOKEN, timeout, patience, connections=in_flight)
        self.max_latency_s = patience + timeout  # the last attempt begins within the patience
        self.costs = {"requests": 0, "prompt_tokens": 0, "completion_tokens": 0}
        self._largest = _FORM_BYTES + max_tokens * _TOKEN_BYTES
        self._pace = AsyncLimiter(1, 1 / per_second) if per_second else None
        self._patience = patience
        self._held_until = 0.0
        """Time of the loop when the endpoint takes requests again."""
        self._places = asyncio.Semaphore(in_flight)
        self._scores: OrderedDict[bytes, float] = OrderedDict()
        result_of(self._require(model))

    async def ask(
        self, images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> torch.Tensor:
        """Score as a call does, on the background loop. The first error ends the other requests."""
        if len(images) != len(prompts):
            raise ValueError(f"got {len(images)} images and {len(prompts)} prompts; expected one prompt per image")
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._judge(at, image, prompt))
                    for at, (image, prompt) in enumerate(zip(as_pil(images), prompts, strict=True))
                ]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return torch.tensor([task.result() for task in tasks], dtype=torch.float32)

    async def _judge(self, at: int, image: Image.Image, prompt: str) -> float:
        async with self._places:
            request = await asyncio.to_thread(self._request, image, prompt)
            key = hashlib.sha256(request).digest()
            if key in self._scores:
                return self._scores[key]
            try:
                score = self._score(await self._complete(request))
            except ValueError as error:
                raise RewardError(NAME, f"failed on image {at} of prompt {printable(prompt, 200)!r}: {error}") from None
        self._scores[key] = score
        while len(self._scores) > _REMEMBERED:
            self._scores.popitem(last=False)
        return score

    def _request(self, image: Image.Image, prompt: str) -> bytes:
        encoded = io.BytesIO()
        image.save(encoded, "png")
        url = f"data:image/png;base64,{base64.b64encode(encoded.getvalue()).decode()}"
        content = [
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "text", "text": self._template.replace("{prompt}", prompt)},
        ]
        return json.dumps({**self._settings, "messages": [{"role": "user", "content": content}]}).encode()

    async def _complete(self, request: bytes) -> Sequence[Choice]:
        async def attempt() -> Completion:
            await asyncio.sleep(self._held_until - asyncio.get_running_loop().time())
            if self._pace is not None:
                await self._pace.acquire()
            self.costs["requests"] += 1
            headers = {"Content-Type": "application/json"}
            return await self._read(
                Completion, "POST", "/chat/completions", self._largest, content=request, headers=headers
            )

        completion = await self._patiently(attempt)
        for kind, number in (completion.usage or Usage()).model_dump().items():
            self.costs[kind] += number
        return completion.choices

    async def _read(self, model: type[Document], method: str, path: str, limit: int, **arguments: Any) -> Document:
        """The document of one request, of at most `limit` bytes."""
        answer = await self._answer(method, path, limit, **arguments)
        try:
            body = read_within(answer, limit)
        except RefusedError as error:
            raise self._unavailable(f"gave an answer that cannot be read: {error.problem.detail}") from None
        too_long = f"more than {limit} bytes"
        if not answer.is_success:
            raise self._refusal(answer, path, too_long if body is None else _message(body))
        if body is None:
            raise self._unavailable(f"answered {answer.status_code} to {path} with {too_long}, as no right answer has")
        try:
            return await asyncio.to_thread(model.model_validate_json, body)
        except ValidationError as error:
            got = printable(body.decode(errors="replace"), 200)
            fault = printable(first_invalid_field(error), 400)
            raise self._unavailable(
                f"did not answer as {path} of OpenAI's interface ({fault}): got {got!r}; check the address"
            ) from None

    def _refusal(self, answer: httpx.Response, path: str, message: str) -> Exception:
        status = answer.status_code
        fault = f"answered {status} to {path}: {message}"
        if status in (408, 429) or status >= 500:
            after = retry_after(answer)
            if status == 429 and after is not None and after <= self._patience:
                self._held_until = max(self._held_until, asyncio.get_running_loop().time() + after)
            return self._temporary(fault, after)
        if status in _REFUSED:
            return ValueError(
                f"at {self.at} {fault}; for a parameter that it refuses, see the judge's options token_limit, "
                "temperature, logprobs and extra_body"
            )
        if status in (401, 403):
            fault += f"; give the API key in {TOKEN}, or in {TOKEN}_PATH's file"
        elif status == 404:
            fault += (
                "; expected an address that /models and /chat/completions can be appended to, such as http://HOST/v1"
            )
        return self._unavailable(fault)

    def _score(self, choices: Sequence[Choice]) -> float:
        if len(choices) != 1:
            raise self._unavailable(f"gave {len(choices)} answers to one question; expected one")
        (choice,) = choices
        text = choice.message.content or ""
        thoughts = f" after {len(choice.thoughts)} characters of reasoning" if choice.thoughts else ""
        if choice.finish_reason == "length":
            end = printable(without_secrets(text)[-100:])
            raise ValueError(
                f"the answer was cut after {self._max_tokens} tokens{thoughts}, at {end!r}; "
                "raise max_tokens, or ask for a shorter answer in the template, or for less reasoning in extra_body"
            )
        tokens = [
            TokenLogprobs(entry.token, {choice.token: choice.logprob for choice in (entry, *entry.top_logprobs)})
            for entry in (choice.logprobs and choice.logprobs.content) or ()
        ]
        try:
            return self._scale.score(text, tokens)
        except ValueError as error:
            raise ValueError(f"the answer{thoughts} {error}; change the template, label or range to fit") from None

    async def _require(self, model: str) -> None:
        there = [served.id for served in (await self._read(Models, "GET", "/models", MODELS_BYTES)).data]
        if model not in there:
            raise ValueError(
                f"got model {model!r}; expected one that {self.at} serves: {printable(repr(sorted(there)))}"
            )


def _message(body: bytes) -> str:
    """The message of an error in OpenAI's form, or the beginning of another body; safe to print."""
    try:
        error = json.loads(body)["error"]
        text = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError, RecursionError):
        text = body.decode(errors="replace")
    return printable(text, 400)
