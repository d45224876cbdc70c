"""An OpenAI-compatible endpoint whose answers depend on the image alone, and that misbehaves on demand."""

import asyncio
import base64
import io
import json
import math
import threading
from typing import Any

import numpy as np
from fastapi import FastAPI, Request, Response
from PIL import Image

MODEL = "judge-7b"
KEY = "a-key"


def brightness(request: dict[str, Any]) -> float:
    """Mean of the pixels of a request's image, in [0, 1]."""
    (message,) = request["messages"]
    (url,) = [part["image_url"]["url"] for part in message["content"] if part["type"] == "image_url"]
    head, _, encoded = url.partition(",")
    assert head == "data:image/png;base64"
    with Image.open(io.BytesIO(base64.b64decode(encoded))) as image:
        assert image.mode == "RGB"
        return float(np.asarray(image).mean() / 255)


def question(request: dict[str, Any]) -> str:
    """Text of a request."""
    (text,) = [part["text"] for part in request["messages"][0]["content"] if part["type"] == "text"]
    return str(text)


def likely(share: float) -> dict[str, float]:
    """Probabilities of the tokens at a score's place: two neighbouring numbers, and text that is none."""
    exact = 1 + 4 * share
    low = min(int(exact), 4)
    return {str(low): 0.9 * (low + 1 - exact), str(low + 1): 0.9 * (exact - low), "five": 0.1}


class FakeJudge:
    """The endpoint, whose exact score of an image is 1 + 4 · its brightness.

    Attributes:
        endpoint: its URL, once a test serves it.
        mode: "well", or a fault.
        faulty: number of further requests to which the fault applies.
        prefix: tokens in front of the score's.
        asked: requests for answers, in order.
        most: most requests at a time so far.
        hold: requests wait until it is set.
        key: API key that requests must have.
    """

    def __init__(self) -> None:
        self.endpoint = ""
        self.mode = "well"
        self.faulty = 10**9
        self.prefix: list[str] = []
        self.asked: list[dict[str, Any]] = []
        self.most = self._open = 0
        self.hold = threading.Event()
        self.hold.set()
        self.key: str | None = None
        self.app = FastAPI()
        self.app.get("/v1/models")(self._models)
        self.app.post("/v1/chat/completions")(self._complete)

    async def _models(self, request: Request) -> Response:
        if self.mode == "echoing":
            return _echo(request)
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return _json({"error": {"message": "Incorrect API key provided", "code": "invalid_api_key"}}, 401)
        return _json({"object": "list", "data": [{"id": MODEL, "object": "model"}, {"id": "another"}]})

    async def _complete(self, request: Request) -> Response:
        asked = await request.json()
        self.asked.append(asked)
        self._open += 1
        self.most = max(self.most, self._open)
        try:
            while not self.hold.is_set():
                await asyncio.sleep(0.005)
            if self.mode != "well" and self.faulty > 0:
                self.faulty -= 1
                if self.mode == "modern" and not asked.keys() & MODERN:
                    return _json(self._document(asked))
                return _echo(request) if self.mode == "echoing" else self._misbehave(asked)
            return _json(self._document(asked))
        finally:
            self._open -= 1

    def _document(self, asked: dict[str, Any]) -> dict[str, Any]:
        """A good answer."""
        share = likely(brightness(asked))
        score = max((text for text in share if text.isdigit()), key=share.__getitem__)
        tokens = [*self.prefix, score]
        alternatives = [{text: 1.0} for text in self.prefix] + [share]
        content = [_token(text, shares) for text, shares in zip(tokens, alternatives, strict=True)]
        content.append(_token("<|im_end|>", {"<|im_end|>": 1.0}))
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": "".join(tokens)},
            "finish_reason": "stop",
            "logprobs": {"content": content, "refusal": None} if asked.get("logprobs") else None,
        }
        usage = {"prompt_tokens": 100, "completion_tokens": len(content), "total_tokens": 100 + len(content)}
        return {"id": "1", "object": "chat.completion", "model": MODEL, "choices": [choice], "usage": usage}

    def _misbehave(self, asked: dict[str, Any]) -> Response:
        if self.mode == "modern":
            return _json({"error": {"message": f"Unsupported parameter: {min(asked.keys() & MODERN)!r}"}}, 400)
        if self.mode in REFUSALS:
            return _json(*REFUSALS[self.mode])
        document = self._document(asked)
        (choice,) = document["choices"]
        match self.mode:
            case "html":
                return Response("<html>\x1b[31mhello", media_type="text/html")
            case "elsewhere":
                return Response(status_code=307, headers={"Location": "/v1/elsewhere"})
            case "no answer":
                document["choices"] = []
            case "nine answers":
                document["choices"] = [choice] * 9
            case "megabytes of answers":
                return Response(b'{"choices": [' + b'{"message": {}}, ' * 2**22 + b'{"message": {}}]}')
            case "only reasoning":
                choice["message"] |= {"content": None, "reasoning_content": "It is grey."}
            case "cut":
                choice["finish_reason"], choice["message"]["content"] = "length", "The image shows"
            case "no log-probabilities":
                choice["logprobs"] = None
            case "log-probabilities that are none":
                choice["logprobs"]["content"][0]["logprob"] = math.nan
            case "log-probabilities of another text":
                choice["logprobs"]["content"] = [_token("hello", {"hello": 1.0})]
            case mode:
                choice["message"]["content"] = TEXTS[mode]
        return _json(document)


REFUSALS: dict[str, Any] = {
    "limited": ({"error": {"message": "Rate limit reached"}}, 429, {"Retry-After": "7"}),
    "limited until a date": ({"error": "slow down"}, 429, {"Retry-After": "Mon, 23 Nov 2026 00:00:00 GMT"}),
    "broken": ({"error": {"message": "CUDA error"}}, 500),
    "too large": ({"error": {"message": "This model's maximum context length is 10 tokens"}}, 400),
    "other document": ({"detail": "no choices here"},),
}
MODERN = {"max_tokens", "temperature", "logprobs"}
"""Fields that newer models refuse."""
TEXTS = {"nothing": None, "outside": "7"}


def _echo(request: Request) -> Response:
    """A refusal that repeats the request's head, as some proxies do."""
    head = "".join(f"{name}: {value}\n" for name, value in request.headers.items())
    return _json({"error": {"message": f"not allowed, {'x' * 380}, {head}", "head": dict(request.headers)}}, 401)


def _token(text: str, shares: dict[str, float]) -> dict[str, Any]:
    """A token with the alternatives at its place, in OpenAI's form."""
    logs = {other: math.log(share) if share > 0 else -9999.0 for other, share in shares.items()}
    top = [{"token": other, "logprob": log, "bytes": list(other.encode())} for other, log in logs.items()]
    return {"token": text, "logprob": logs[text], "bytes": list(text.encode()), "top_logprobs": top}


def _json(document: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps(document), status, headers, "application/json")  # writes NaN as such
