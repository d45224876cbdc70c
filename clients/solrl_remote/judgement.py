"""Scores in the answers of judges: the number that an answer states, or its mean over the tokens' probabilities."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from solrl_proto.secrets import without_secrets

_NUMBER = r"([+-]?[0-9]+(?:\.[0-9]+)?)"
_ALONE = re.compile(rf"\s*{_NUMBER}\.?\s*")
_AFTER_LABEL = re.compile(rf"\s*{_NUMBER}\.?(?=\s|\Z)")
_DIGIT = re.compile(r"\s*([0-9])\s*")


@dataclass(frozen=True)
class TokenLogprobs:
    """One token of an answer, and log-probabilities of the likeliest tokens at its place, by their text."""

    text: str
    log_probabilities: Mapping[str, float]


@dataclass(frozen=True)
class Scale:
    """Form and range of a judge's scores.

    Args:
        lowest, highest: range of the scores.
        label: text in front of the score, exactly once in an answer. For example "Final Score:" reads 4 from
            "The cat is red. Final Score: 4". Without a label, the answer must be the number alone.

    Raises:
        ValueError: the range is empty or not finite.
    """

    lowest: float
    highest: float
    label: str = ""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.lowest) and math.isfinite(self.highest) and self.lowest < self.highest):
            raise ValueError(f"got lowest {self.lowest} and highest {self.highest}; expected numbers that increase")

    def score(self, text: str, tokens: Sequence[TokenLogprobs] = ()) -> float:
        """Score of an answer, without its reasoning up to `</think>`.

        It is the number in the answer. On a scale within 0 to 9, each whole number is one token: the score is the
        numbers' mean, weighted by their probabilities at the answer's number, if `tokens` has them.

        Raises:
            ValueError: the answer has no score in this form, a score out of range, or only reasoning.
        """
        text = _after_thoughts(text)
        match = self._match(text)
        value = float(match[1])
        if not self.lowest <= value <= self.highest:
            raise ValueError(f"states the score {match[1]}; expected {self.lowest:g} to {self.highest:g}")
        token = _token_at(text, match.span(1), tokens)
        return value if token is None else self._expected(token, value)

    def _match(self, text: str) -> re.Match[str]:
        if not self.label:
            match = _ALONE.fullmatch(text)
            if match is None:
                raise ValueError(f"has no score: got {_quote(text)}; expected a number alone")
            return match
        count = text.count(self.label)
        if count != 1:
            raise ValueError(
                f"has {count} times {self.label!r}: got {_quote(text)}; expected one, with a number after it"
            )
        match = _AFTER_LABEL.match(text, text.index(self.label) + len(self.label))
        if match is None:
            raise ValueError(f"has no number after {self.label!r}: got {_quote(text)}")
        return match

    def _expected(self, token: TokenLogprobs, stated: float) -> float:
        if not (self.lowest >= 0 and self.highest <= 9):
            return stated  # "1" may begin "10"
        numbers = {
            text: float(digit[1])
            for text in token.log_probabilities
            if (digit := _DIGIT.fullmatch(text)) and self.lowest <= float(digit[1]) <= self.highest
        }
        weights = {text: math.exp(token.log_probabilities[text]) for text in numbers}
        total = sum(weights.values())
        if not total > 0:
            return stated
        return sum(weights[text] * number for text, number in numbers.items()) / total


def _after_thoughts(text: str) -> str:
    """What follows reasoning within an answer; `<think>` itself may be in the model's template."""
    _, end, answer = text.rpartition("</think>")
    if not end and text.lstrip().startswith("<think>"):
        raise ValueError(f"has no end of its reasoning, </think>: got {_quote(text)}")
    return answer


def _token_at(text: str, span: tuple[int, int], tokens: Sequence[TokenLogprobs]) -> TokenLogprobs | None:
    """The token that is exactly this part of the text, apart from white space; None if there is none."""
    joined = "".join(token.text for token in tokens)
    # In front of the text there may be reasoning, and after it the token that ends it.
    began = joined.rfind(text)
    if began < 0:
        return None
    at = 0
    for token in tokens:
        end = at + len(token.text)
        if at <= began + span[0] < end:
            return token if token.text.strip() == text[slice(*span)] else None
        at = end
    return None


def _quote(text: str) -> str:
    text = without_secrets(text)
    return repr(text if len(text) <= 200 else f"{text[:100]} … {text[-100:]}")
