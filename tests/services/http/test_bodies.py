"""Bodies that are slow, or too many at once; the budget and the tenant's quota are checked before a body is read."""

import asyncio
import contextlib
import json
import socket
import tracemalloc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from solrl_http.limits.bodies import RATE, Bodies, InflightBytes, Pace
from solrl_http.settings import HttpSettings
from starlette.types import Message, Receive, Scope, Send
from tests.services.reward_servers import until
from tests.services.security_helpers import raw
from tests.support.service_helpers import MODEL, RunningService, read_response, rollout_request, running_service

MIB = 2**20
DIGEST = "Content-Digest: sha-256=:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=:"
TYPE = "Content-Type: application/octet-stream"
JSON = {"Content-Type": "application/json"}
QUOTA = MIB // 2
LENGTHS = pytest.mark.parametrize("chunked", [False, True], ids=["declared", "chunked"])


@pytest.fixture(scope="module")
def small() -> Iterator[RunningService]:
    """A service with a budget for two bodies of the largest size, and a quota for half of one in its store."""
    limits = ["--max-inflight-bytes", str(2 * MIB), "--max-adapter-bytes", str(MIB), "--max-body-bytes", str(MIB)]
    with running_service(*limits, "--tenant-adapter-bytes", str(QUOTA)) as running:
        yield running
        assert "Traceback" not in running.log.read_text()


@pytest.fixture(scope="module")
def impatient() -> Iterator[RunningService]:
    """A service that waits a second for the next part of a body."""
    with running_service("--slow-client-timeout", "1", "--max-connections", "3") as running:
        yield running
        assert "Traceback" not in running.log.read_text()


def rollout_head(length: str) -> str:
    return f"POST /v1/rollouts HTTP/1.1\nHost: localhost\nContent-Type: application/json\n{length}"


def adapter_head(length: str) -> str:
    return f"PUT /v1/runs/held/adapters/0?model={MODEL} HTTP/1.1\nHost: localhost\n{DIGEST}\n{TYPE}\n{length}"


@contextlib.contextmanager
def held(service: RunningService, head: str, body: bytes) -> Iterator[socket.socket]:
    """A request whose body is only partly sent."""
    with socket.create_connection(("127.0.0.1", service.port), timeout=600) as sock:
        sock.sendall(head.replace("\n", "\r\n").encode() + b"\r\n\r\n" + body)
        yield sock


@pytest.mark.parametrize("head", [rollout_head, adapter_head])
@pytest.mark.parametrize("sent", [1, 800_000], ids=["silent", "silent after much data"])
@LENGTHS
def test_a_client_that_does_not_finish_its_body_is_disconnected(
    impatient: RunningService, head: Any, sent: int, chunked: bool
) -> None:
    """Its time limit does not grow with the data sent before."""
    body = b"%x\r\n%b\r\n" % (sent, b" " * sent) if chunked else b" " * sent
    length = "Transfer-Encoding: chunked" if chunked else "Content-Length: 900000"
    with held(impatient, head(length), body) as sock:
        status, _, answer = read_response(sock)
        assert (status, json.loads(answer)["type"]) == (408, "urn:solrl:problem:request-timeout")
        assert not sock.recv(1)


def test_a_body_that_trickles_is_cut_off(impatient: RunningService) -> None:
    with held(impatient, rollout_head("Content-Length: 100000"), b"{") as sock:
        sock.settimeout(0.1)
        while True:
            with contextlib.suppress(TimeoutError):
                sock.sendall(b" ")
                if answer := sock.recv(100):
                    break
    assert answer.startswith(b"HTTP/1.1 408")


def test_a_body_may_take_as_long_as_it_keeps_its_pace() -> None:
    pace = Pace(slow=20, due=20)
    pace.add(RATE * 20 - 1, now=19)
    assert pace.due == 20
    pace.add(1, now=19.5)
    assert pace.due == 39.5


def test_one_connection_too_many_gets_an_answer(impatient: RunningService) -> None:
    def status() -> int:
        with socket.create_connection(("127.0.0.1", impatient.port), timeout=600) as sock:
            sock.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            return int(sock.makefile("rb").readline().split()[1])

    impatient.client.close()
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(socket.create_connection(("127.0.0.1", impatient.port), timeout=600))
        until(lambda: status() == 503)
    until(lambda: status() == 200)


@LENGTHS
def test_bodies_beyond_the_budget_are_refused_before_they_are_read(small: RunningService, chunked: bool) -> None:
    length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {MIB}"
    part = b"%x\r\n%b\r\n" % (MIB - 1000, b" " * (MIB - 1000)) if chunked else b" " * 1000
    with held(small, rollout_head(length), part), held(small, rollout_head(length), part):
        until(lambda: small.client.post("/v1/rollouts", content=b" " * 4000, headers=JSON).status_code == 503)
        status, headers, answer = raw(small.port, rollout_head(f"Content-Length: {MIB}"))
        assert (status, json.loads(answer)["type"]) == (503, "urn:solrl:problem:too-many-bytes")
        assert headers["retry-after"] == "5"
        assert small.client.get("/v1/models").status_code == 200
    # Both connections were closed, and their bytes are free again.
    until(lambda: small.client.post("/v1/rollouts", json=rollout_request(count=1, steps=1)).is_success)


@LENGTHS
def test_bodies_count_until_answered_and_are_in_memory_once(chunked: bool) -> None:
    count, size, part = 4, 16 * MIB, 2**16
    received: list[Message] = []

    def client() -> Receive:
        sent = 0

        async def receive() -> Message:
            nonlocal sent
            sent += part
            await asyncio.sleep(0)  # the other clients send meanwhile
            return {"type": "http.request", "body": bytes(part), "more_body": sent < size}

        return receive

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        received.append(await receive())
        assert budget.reserved >= size

    async def send(message: Message) -> None:
        pytest.fail(str(message))

    headers = [] if chunked else [(b"content-length", str(size).encode())]
    rule = SimpleNamespace(body_limit_setting="max_body_bytes")
    budget = InflightBytes(count * size, count * size)
    bodies = Bodies(app, HttpSettings(max_body_bytes=size), budget)

    async def collect() -> None:
        scopes: list[Scope] = [{"type": "http", "headers": headers, "state": {"rule": rule}} for _ in range(count)]
        await asyncio.gather(*(bodies(scope, client(), send) for scope in scopes))  # type: ignore[arg-type]

    tracemalloc.start()
    try:
        asyncio.run(collect())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [len(message["body"]) for message in received] == count * [size]
    assert peak < (count + chunked + 0.3) * size  # a body without a length is joined
    assert budget.reserved == 0
