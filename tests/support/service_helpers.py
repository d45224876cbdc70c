"""Running the real service as a subprocess, and talking to it."""

import base64
import io
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from PIL import Image
from solrl_core.adapter import encode_adapter
from solrl_proto.adapters import ADAPTER_MEDIA_TYPE
from solrl_proto.rollouts import STREAM_MEDIA_TYPE
from solrl_rollout.__main__ import main

from tests.support.adapters import content_digest, random_adapter
from tests.support.ports import free_port
from tests.support.programs import Program, command

PROGRAM = str(Path(sys.executable).parent / "solrl-rollout")
MODEL = "mini-sana"
BODY_LIMIT = 2**20
QUEUE_LIMIT = 4096
Layout = dict[str, tuple[int, int]]


@dataclass(frozen=True)
class RunningService:
    """A service process, a client for it, and its log."""

    process: Program
    port: int
    client: httpx.Client
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def rollout(self, **request: Any) -> dict[str, Any]:
        """The answer to a request that must succeed."""
        response = self.client.post("/v1/rollouts", json=rollout_request(**request))
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def lines(self, **request: Any) -> list[dict[str, Any]]:
        """The lines of a streamed answer."""
        headers = {"Accept": STREAM_MEDIA_TYPE}
        response = self.client.post("/v1/rollouts", json=rollout_request(**request), headers=headers)
        assert (response.status_code, response.headers["content-type"]) == (200, STREAM_MEDIA_TYPE), response.text
        return [json.loads(line) for line in response.text.splitlines()]

    def push(self, run: str, version: int, body: bytes, parent: int | None = None) -> httpx.Response:
        """PUT an adapter with its true digest."""
        return self.put(f"/v1/runs/{run}/adapters/{version}", body, parent=parent)

    def put(self, path: str, body: bytes, **query: Any) -> httpx.Response:
        """PUT with query parameters, except those that are None."""
        query = {k: v for k, v in ({"model": MODEL} | query).items() if v is not None}
        return self.client.put(path, content=body, params=query, headers=adapter_headers(body))

    def send(self, request: dict[str, Any], part: float = 1.0, accept: str = "*/*") -> "RawRequest":
        """Start a POST /v1/rollouts on a separate socket; sends only `part` of the body."""
        body = json.dumps(request).encode()
        sent = int(len(body) * part)
        head = (
            f"POST /v1/rollouts HTTP/1.1\r\nHost: localhost\r\nAccept: {accept}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=600)
        sock.sendall(head.encode() + body[:sent])
        return RawRequest(sock, body[sent:])


@dataclass(frozen=True)
class RawRequest:
    """A request on a separate socket, which can be left incomplete or abandoned."""

    socket: socket.socket
    rest: bytes

    def response(self) -> tuple[int, dict[str, str], bytes]:
        """Send the rest of the body and read status, headers and body."""
        self.socket.sendall(self.rest)
        return read_response(self.socket)

    def leave(self) -> None:
        """Close the connection."""
        self.socket.close()


def read_response(sock: socket.socket, has_body: bool = True) -> tuple[int, dict[str, str], bytes]:
    """Status, headers (names in lower case) and body of the next response; a HEAD's has none."""
    with sock.makefile("rb") as stream:
        status = int(stream.readline().split()[1])
        headers = {}
        while line := stream.readline().strip():
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        return status, headers, stream.read(int(headers.get("content-length", -1))) if has_body else b""


@contextmanager
def running_service(
    *flags: str, model: str | list[str] = MODEL, port: int | None = None, ends_with: int = 0
) -> Iterator[RunningService]:
    """`solrl-rollout serve` with `flags`; at the end it must stop on SIGTERM with exit code 0, or `ends_with`.

    Its process is forked from one that has imported the command.
    """
    port = free_port() if port is None else port
    # For tests.services.faulty_rewards.
    paths = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": paths, "COLUMNS": "120"}
    models = [model] if isinstance(model, str) else model
    words = ["serve", "--model", *models, "--port", str(port), *flags]
    with tempfile.TemporaryDirectory(prefix="solrl-service-") as folder:
        log = Path(folder, "log")
        sys.audit("solrl.fork", None, [PROGRAM])  # for `--unit`, like an event of subprocess
        process = Program(command, (main, (PROGRAM, *words), os.getcwd(), environment), log)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600) as client:
                service = RunningService(process, port, client, log)
                while not is_ready(service.url):
                    assert process.alive, f"the service ended during its start:\n{log.read_text()}"
                yield service
            process.send_signal(signal.SIGTERM)
            assert process.wait(600) == ends_with, log.read_text()
        finally:
            process.kill()
            process.wait()


def is_ready(url: str) -> bool:
    """Whether a service says that it is ready; waits a moment if it does not answer."""
    try:
        return httpx.get(f"{url}/health/ready", timeout=600).status_code == 200
    except httpx.TransportError:
        time.sleep(0.05)
        return False


@asynccontextmanager
async def client_of(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a service in this process, which runs meanwhile."""
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=600) as client,
    ):
        yield client


def adapter_headers(body: bytes) -> dict[str, str]:
    """Headers of a PUT of an adapter."""
    return {"Content-Digest": content_digest(body), "Content-Type": ADAPTER_MEDIA_TYPE}


def rollout_request(
    prompts: list[str] | None = None,
    count: int | None = None,
    seeds: list[list[int]] | None = None,
    adapter: tuple[str, int] | None = None,
    metadata: dict[str, Any] | None = None,
    steps: int = 2,
    precision: str = "nvfp4",
    images: str = "none",
    rewards: tuple[str, ...] = ("clipscore",),
    model: str = MODEL,
    **plan: Any,
) -> dict[str, Any]:
    """A request with short defaults; other arguments are fields of its plan."""
    texts = prompts if prompts is not None else ["a red circle"]
    if seeds is None:
        candidates: dict[str, Any] = {"count": 4 if count is None else count, "seed_root": 7}
    else:
        candidates = {"seeds": seeds}
    return {
        "model": model,
        "adapter": adapter and {"run": adapter[0], "version": adapter[1]},
        "prompts": [{"id": f"p{i}", "text": t, "metadata": metadata or {}} for i, t in enumerate(texts)],
        "candidates": candidates,
        "plan": {"steps": steps, "precision": precision, **plan},
        "rewards": [{"name": name} for name in rewards],
        "images": images,
    }


def scores(answer: dict[str, Any]) -> list[list[float]]:
    """The scores of each group."""
    return [group["scores"] for group in answer["groups"]]


def pixels(answer: dict[str, Any], group: int = 0) -> np.ndarray:
    """Images of a group, int [N, H, W, 3]."""
    files = (io.BytesIO(base64.b64decode(image)) for image in answer["groups"][group]["images"])
    return np.stack([np.asarray(Image.open(file)).astype(int) for file in files])


def adapter_file(layout: Layout, seed: int, size: float = 0.2) -> bytes:
    return encode_adapter(random_adapter(layout, seed, size))


def problem(response: httpx.Response) -> dict[str, Any]:
    """The problem document of a response, which must be one."""
    assert response.headers["content-type"] == "application/problem+json", response.text
    document: dict[str, Any] = json.loads(response.text, parse_constant=pytest.fail)
    assert document["status"] == response.status_code
    assert document["title"]
    assert document["detail"]
    return document | {"kind": document["type"].removeprefix("urn:solrl:problem:")}
