"""A small real HTTP service that answers like a rollout service, except for answers that a test replaces."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from solrl_proto.adapters import adapter_digest
from solrl_proto.rollouts import RolloutRequest
from starlette.types import Receive, Scope, Send
from tests.services.reward_servers import serving

DIGEST = "sha256:" + "0" * 64


@dataclass(frozen=True)
class Answer:
    """A complete answer, sent unchanged; `cut` omits its end."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    parts: tuple[bytes, ...] = (b"",)
    cut: bool = False


@dataclass
class HostileService:
    """Answers of the service, and the requests that it received.

    Attributes:
        change_start: changes the first line of a rollout answer.
        change_group: changes the line of a group.
        change_stored: changes the answer to a PUT.
        change_lines: changes all lines of a rollout answer.
        answers: whole answers for the next requests, before it answers by itself again.
        asked: bodies of the rollout requests.
        bodies: of all requests.
        headers: of all requests.
    """

    url: str = ""
    change_start: Callable[[dict[str, Any]], None] = lambda line: None
    change_group: Callable[[dict[str, Any]], None] = lambda line: None
    change_stored: Callable[[dict[str, Any]], None] = lambda stored: None
    change_lines: Callable[[list[bytes]], list[bytes]] = lambda lines: lines
    answers: list[Answer] = field(default_factory=list)
    asked: list[dict[str, Any]] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application, which has no events of its lifespan."""
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.headers.append({name.decode(): value.decode("latin-1") for name, value in scope["headers"]})
        self.bodies.append(body)
        if scope["path"] == "/v1/rollouts":
            self.asked.append(json.loads(body))
        answer = self.answers.pop(0) if self.answers else self._answer(scope, body)
        headers = [(name.encode(), value.encode("utf-8")) for name, value in answer.headers.items()]
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        for part in answer.parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        if answer.cut:
            raise ConnectionError  # uvicorn then drops the connection without the end of the body
        await send({"type": "http.response.body", "body": b""})

    def _answer(self, scope: Scope, body: bytes) -> Answer:
        if scope["method"] == "PUT":
            _, run, _, version = scope["path"].removeprefix("/v1/").split("/")
            stored = {"run": run, "version": int(version), "parent": None, "model": "mini-sana", "size": len(body)}
            stored |= {"digest": adapter_digest(body), "modules": 1, "rank": 2, "alpha": 2.0}
            self.change_stored(stored)
            return Answer(parts=(json.dumps(stored).encode(),))
        lines = []
        for line in honest_lines(RolloutRequest.model_validate_json(body)):
            if line["kind"] == "start":
                self.change_start(line)
            if line["kind"] == "group":
                self.change_group(line)
            lines.append(json.dumps(line).encode() + b"\n")
        return Answer(parts=tuple(self.change_lines(lines)))


def honest_lines(request: RolloutRequest) -> list[dict[str, Any]]:
    """The lines of a correct answer; seeds determine the rewards."""
    precision = "bf16" if request.plan.precision == "auto" else request.plan.precision
    served = {"precision": precision, "numerics": "native", "fingerprint": DIGEST}
    served |= request.model_dump(mode="json", include={"model", "adapter", "plan"})
    lines: list[dict[str, Any]] = [{"kind": "start", "served": served}]
    for prompt, seeds in request.groups():
        rewards = {spec.name: [(seed % 1009) / 1009 + at for seed in seeds] for at, spec in enumerate(request.rewards)}
        weights = {spec.name: spec.weight for spec in request.rewards}
        scores = [sum(weights[name] * values[i] for name, values in rewards.items()) for i in range(len(seeds))]
        group = {"kind": "group", "prompt_id": prompt.id, "seeds": seeds, "scores": scores, "rewards": rewards}
        if request.images == "png":
            group["images"] = ["aW1hZ2U="] * len(seeds)
        lines.append(group)
    seconds = {"queued": 0.1, "switch": 0.2, "generate": 0.3, "reward": 0.4}
    return [*lines, {"kind": "end", "groups": len(request.prompts), "seconds": seconds}]


@contextmanager
def hostile_service() -> Iterator[HostileService]:
    """The service in a thread, on a free loopback port."""
    service = HostileService()
    with serving(service) as service.url:
        yield service
