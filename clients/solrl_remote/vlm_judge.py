"""A vision language model as a judge, asked at an OpenAI-compatible endpoint."""

import asyncio
import base64
import hashlib
import io
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError
from typing import Any

import torch
from PIL import Image
from solrl_client.background import result_of
from solrl_core.errors import RewardError
from solrl_core.fingerprint import combined_digest, source_digest
from solrl_core.rewards.images import as_pil
from solrl_proto.printable import printable
from solrl_proto.secrets import without_secrets

from solrl_remote.chat import ChatEndpoint, Choice
from solrl_remote.judgement import Scale, TokenLogprobs

NAME = "vlm_judge"
TEMPLATE = (
    "The image was generated from this caption:\n{prompt}\n\n"
    "How well does it show what the caption describes, and how good does it look? Answer with one whole number from "
    "{lowest} (worst) to {highest} (best), and nothing else."
)
_ALTERNATIVES = 20
_REMEMBERED = 4096
"""Scores that are kept, so that a call repeated after a fault costs nothing twice."""


class VlmJudge:
    """Scores that a vision language model gives to images and their prompts, at temperature 0.

    The model is asked about each image by itself. Its score is the number that it states, or, on a scale within 0 to
    9, the mean of the whole numbers over their probabilities, where the endpoint gives log-probabilities.

    Args:
        endpoint: address to which `/chat/completions` is appended, such as http://127.0.0.1:8000/v1.
        model: the model's name there.
        template: question about an image; `{prompt}` stands for its prompt, `{lowest}` and `{highest}` for the range.
        label: text in front of the score in an answer; without it, an answer must be a number alone.
        lowest, highest: range of the scores.
        max_tokens: most tokens of an answer; one that is cut there is an error.
        logprobs: whether to ask for log-probabilities, which some endpoints refuse.
        timeout: seconds within which an answer must be complete.
        patience: seconds for which a request is repeated after temporary faults, with growing pauses.
        in_flight: most requests at a time.
        per_second: most requests in a second; None for no limit.
        device: ignored; the endpoint has its own.

    Attributes:
        at: address of the endpoint.
        max_latency_s: seconds within which a question is answered, or its fault is told.
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
        self._scale = Scale(lowest, highest, label)
        self._template = template.replace("{lowest}", f"{lowest:g}").replace("{highest}", f"{highest:g}")
        self._settings: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": max_tokens}
        if logprobs:
            self._settings |= {"logprobs": True, "top_logprobs": _ALTERNATIVES}
        form = json.dumps([self._settings, self._template, label, lowest, highest], sort_keys=True)
        self.digest = combined_digest(NAME, form, source_digest(Scale))
        self._endpoint = ChatEndpoint(
            NAME,
            endpoint,
            timeout=timeout,
            patience=patience,
            in_flight=in_flight,
            per_second=per_second,
        )
        self.at = self._endpoint.address
        self.max_latency_s = patience + timeout  # the last attempt begins within the patience
        self._places = asyncio.Semaphore(in_flight)
        self._scores: OrderedDict[bytes, float] = OrderedDict()
        self._require(model)

    @property
    def costs(self) -> dict[str, int]:
        """Requests sent, and tokens that the endpoint says were used, since the start."""
        return dict(self._endpoint.costs)

    def __call__(
        self, images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
    ) -> torch.Tensor:
        """Score images [N, 3, H, W], in [0, 1] or uint8, with N prompts; float32 [N].

        Raises:
            ValueError: the numbers of images and prompts differ.
            RewardError: an answer about an image has no score.
            RewardUnavailableError: the endpoint gave no usable answer.
        """
        try:
            return result_of(self.ask(images, prompts, metadata))
        except CancelledError:
            raise self._endpoint.unavailable("was not asked to the end: nobody waits for it any more") from None

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
        """Score of one image, the one at this index."""
        async with self._places:
            request = await asyncio.to_thread(self._request, image, prompt)
            key = hashlib.sha256(request).digest()
            if key in self._scores:
                return self._scores[key]
            try:
                score = self._read((await self._endpoint.complete(request)).choices)
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

    def _read(self, choices: Sequence[Choice]) -> float:
        """Score of an answer."""
        if len(choices) != 1:
            raise self._endpoint.unavailable(f"gave {len(choices)} answers to one question; expected one")
        (choice,) = choices
        text = choice.message.content or ""
        if choice.finish_reason == "length":
            end = printable(without_secrets(text)[-100:])
            raise ValueError(
                f"the answer was cut after {self._settings['max_tokens']} tokens, at {end!r}; "
                "raise max_tokens, or ask for a shorter answer in the template"
            )
        try:
            return self._scale.score(text, _tokens(choice))
        except ValueError as error:
            raise ValueError(f"the answer {error}; change the template, label or range to fit") from None

    def _require(self, model: str) -> None:
        there = result_of(self._endpoint.models())
        if model not in there:
            raise ValueError(
                f"got model {model!r}; expected one that {self.at} serves: {printable(repr(sorted(there)))}"
            )


def _tokens(choice: Choice) -> list[TokenLogprobs]:
    """Tokens of an answer, if the endpoint gives them."""
    given = (choice.logprobs and choice.logprobs.content) or ()
    return [
        TokenLogprobs(one.token, {other.token: other.logprob for other in (one, *one.top_logprobs)}) for one in given
    ]
