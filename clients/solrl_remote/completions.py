"""The parts of OpenAI's answers that a judge reads, and the most bytes of a valid answer.

Lists are bounded: a list of objects takes up to seventy times its bytes in memory.
"""

from typing import Annotated

from pydantic import BaseModel, Field

ALTERNATIVES = 20
"""Log-probabilities that are asked for at each token."""
MOST_CHOICES = 8
"""Answers that are counted, in an error; one was asked for."""
MODELS_BYTES = 2 * 2**20
"""Most bytes of the list of models: providers have some thousand."""
_FORM_BYTES = 2**15
"""Most bytes of an answer without tokens, or of a refusal."""
_TOKEN_BYTES, _ALTERNATIVE_BYTES = 256, 192
"""Bytes of a token's escaped text in the answer and its reasoning fields; and of a token with its log-probability."""


def answer_bytes(tokens: int, *, logprobs: bool) -> int:
    """The most bytes of a valid answer of `tokens` tokens, with or without log-probabilities."""
    return _FORM_BYTES + tokens * (_TOKEN_BYTES + logprobs * (ALTERNATIVES + 1) * _ALTERNATIVE_BYTES)


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
