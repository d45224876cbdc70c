"""Real servers on the loopback, in threads and processes, and a reward server that misbehaves."""

import asyncio
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
import uvicorn
from solrl_core.fingerprint import combined_digest
from solrl_core.rewards.wire import decode_scoring, encode_scoring
from solrl_http.serving import bind
from solrl_proto.problems import PROBLEM_MEDIA_TYPE, ProblemKind
from solrl_proto.scores import SCORES_MEDIA_TYPE, ScoreAnswer, ScorePrompt, ScoreRequest
from solrl_reward.__main__ import main
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from tests.support.ports import free_port
from tests.support.programs import Program, command
from tests.support.service_helpers import is_ready

DIGEST = combined_digest("as announced")
NAME = "brightness"


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """The address of an ASGI application under uvicorn."""
    listener = bind("127.0.0.1", 0)
    config = uvicorn.Config(app, log_config=None, ws="none", timeout_graceful_shutdown=1, timeout_keep_alive=600)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server ended during its start"
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


@contextmanager
def client_at(app: Any) -> Iterator[httpx.Client]:
    """A client of an ASGI application under uvicorn."""
    with serving(app) as address, httpx.Client(base_url=address, timeout=600) as client:
        yield client


def pictures(count: int, seed: int = 0, side: int = 32) -> torch.Tensor:
    """Random images, uint8 [count, 3, side, side]."""
    return torch.randint(256, (count, 3, side, side), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def body(images: torch.Tensor, *rewards: str, metadata: list[dict[str, Any]] | None = None) -> bytes:
    """A request for scores with prompts that differ."""
    given = metadata or [{} for _ in images]
    prompts = tuple(ScorePrompt(text=f"a red circle, {i}", metadata=one) for i, one in enumerate(given))
    return encode_scoring(images, ScoreRequest(rewards=rewards, prompts=prompts))


def ask(client: httpx.Client, content: bytes, **headers: str) -> httpx.Response:
    return client.post("/v1/scores", content=content, headers={"Content-Type": SCORES_MEDIA_TYPE, **headers})


def scores(client: httpx.Client, content: bytes, **headers: str) -> ScoreAnswer:
    response = ask(client, content, **headers)
    assert response.status_code == 200, response.text
    return ScoreAnswer.model_validate_json(response.content)


class RewardProcess:
    """`solrl-reward serve` in a process of its own, with rewards of this folder. It can be killed and started again.

    It scores one request at a time.
    """

    def __init__(self, folder: Path, *rewards: str) -> None:
        port = free_port()
        self.address = f"http://127.0.0.1:{port}"
        flags = ["--device", "cpu", "--batch", "1", "--port", str(port)]
        self._words = ["solrl-reward", "serve", "--rewards", *rewards, *flags]
        self._folder = folder
        self._client = httpx.Client(base_url=self.address, timeout=600)
        self.program: Program | None = None

    def start(self) -> None:
        """Start the process and wait until it is ready."""
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        sys.audit("solrl.fork", None, self._words)  # for `--unit`, like an event of subprocess
        arguments = (main, self._words, str(self._folder), environment)
        self.program = Program(command, arguments, self._folder / "reward-server.log")
        while not is_ready(self.address):
            assert self.program.alive, self.program.log.read_text()

    @property
    def waiting(self) -> int:
        """Images in its queue; those that it scores are not counted."""
        shown = re.findall(r"^solrl_score_queue_images (\S+)", self._client.get("/metrics").text, re.MULTILINE)
        return int(float(shown[0]))

    def close(self) -> None:
        """Kill the process, if it runs."""
        if self.program is not None:
            self.program.kill()


class Misbehaving:
    """A reward server of one reward, the mean of an image's pixels, that does what `mode` says, and sets a cookie.

    Attributes:
        address: its URL, once a test serves it.
        mode: "well", or a fault.
        asked: paths of all requests.
        heads: headers of all requests.
        ports: the client's port of each connection, for all requests.
        left: whether a client has left before its answer in mode "slow".
        leave: ends a hanging answer.
        max_latency_s: seconds that it says the reward may wait for another service.
    """

    def __init__(self, mode: str = "well") -> None:
        self.address = ""
        self.mode = mode
        self.asked: list[str] = []
        self.heads: list[dict[str, str]] = []
        self.ports: list[int] = []
        self.left = False
        self.leave = threading.Event()
        self.max_latency_s: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        body = await Request(scope, receive).body()
        mode = self.mode  # before the request counts, since a test may then change it
        self.asked.append(scope["path"])
        self.ports.append(scope["client"][1])
        self.heads.append({name.decode(): value.decode() for name, value in scope["headers"]})
        if scope["path"] == "/v1/rewards":
            reward = {"name": NAME, "digest": DIGEST, "max_latency_s": self.max_latency_s}
            await _json({"rewards": [reward]})(scope, receive, send)
            return
        if scope["path"] != "/v1/scores":
            await Response("no such page", 404)(scope, receive, send)
            return
        images, _ = decode_scoring(body)
        scores = [float(image.float().mean() / 255) for image in images]
        match mode:
            case "slow":
                departure = asyncio.ensure_future(receive())
                while not (self.leave.is_set() or departure.done()):
                    await asyncio.sleep(0.01)
                self.left = self.left or departure.done()
                departure.cancel()
            case "dripping":
                await _drip(self.leave, send)
                return
            case "cut":
                await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"999")]})
                await send({"type": "http.response.body", "body": b'{"scores"'})
                return
            case "broken":
                raise RuntimeError("broken on purpose")
        given = SCORES.get(mode, lambda scores: scores)(scores)
        digest = combined_digest("another") if mode == "digest" else DIGEST
        answer = ANSWERS.get(mode) or _json({"scores": {NAME: given}, "digests": {NAME: digest}})
        await answer(scope, receive, send)


def _json(document: dict[str, Any]) -> Response:
    body = json.dumps(document)  # writes NaN as such
    return Response(body, headers={"Set-Cookie": "seen=1"}, media_type="application/json")


SCORES: dict[str, Callable[[list[float]], list[float]]] = {
    "nan": lambda scores: [*scores[:-1], float("nan")],
    "infinite": lambda scores: [float("inf"), *scores[1:]],
    "short": lambda scores: scores[:-1],
    "long": lambda scores: [*scores, 0.5],
}
PROBLEMS = {"fails": ProblemKind.REWARD_FAILED, "busy": ProblemKind.QUEUE_FULL, "locked": ProblemKind.UNAUTHENTICATED}
ANSWERS = {
    "garbage": Response("<html>", media_type="text/html"),
    "huge": Response(b" " * (2**18 + 1), media_type="application/json"),
    "packed": Response("x", headers={"Content-Encoding": "gzip"}, media_type="application/json"),
    "elsewhere": Response(status_code=307, headers={"Location": "/v1/elsewhere"}),
} | {
    mode: Response(kind.problem("as the test says").model_dump_json(), kind.status, media_type=PROBLEM_MEDIA_TYPE)
    for mode, kind in PROBLEMS.items()
}
FAULTS = {
    **dict.fromkeys(("slow", "dripping", "cut"), "gave no answer"),
    **{"nan": "gave nan for image 1", "infinite": "gave inf for image 0", "digest": "has the digest sha256:"},
    **{"short": "gave 1 scores for 2 images", "long": "gave 3 scores for 2 images", "packed": "Content-Encoding"},
    **{"garbage": "Unexpected answer", "huge": "a document of more than", "elsewhere": "answered 307"},
    **{"busy": "answered 429", "locked": "SOLRL_REWARD_TOKEN", "broken": "answered 500"},
}
"""Modes of `Misbehaving`, and what a client says of each."""


async def _drip(until: threading.Event, send: Send) -> None:
    """One byte at a time, each soon enough for a limit of the time between two bytes."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    while not until.is_set():
        await send({"type": "http.response.body", "body": b" ", "more_body": True})
        await asyncio.sleep(0.02)


def until(reached: Callable[[], bool]) -> None:
    """Wait until a condition holds; fails after ten minutes."""
    deadline = time.monotonic() + 600
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.01)
