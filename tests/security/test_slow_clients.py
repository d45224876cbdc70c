"""Clients that take for ever over a head, a body or an answer, beside healthy ones."""

import contextlib
import json
import socket
import time
from collections.abc import Iterator

import pytest
from service_helpers import RunningService, read_response, running_service

HEAD = b"POST /v1/rollouts HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
CONNECTIONS = 240


@pytest.fixture(scope="module")
def impatient() -> Iterator[RunningService]:
    """A service that waits for nobody longer than a second."""
    flags = ["--slow-client-timeout", "1", "--keep-alive-timeout", "1", "--max-connections", str(CONNECTIONS)]
    with running_service(*flags) as running:
        yield running
        assert "Traceback" not in running.log.read_text()


def connect(service: RunningService) -> socket.socket:
    return socket.create_connection(("127.0.0.1", service.port), timeout=60)


def trickle(sock: socket.socket, bytes_a_time: bytes = b"x") -> bytes:
    """Send a little at a time until the other side answers; what it answers."""
    received = b""
    sock.settimeout(0.1)
    for _ in range(600):
        try:
            sock.sendall(bytes_a_time)
            part = sock.recv(65536)
        except TimeoutError:
            continue
        except (BrokenPipeError, ConnectionResetError):
            break
        if not part:
            break
        received += part
    else:
        pytest.fail("nobody cut this client")
    return received


@pytest.mark.parametrize(
    ("begun", "each"),
    [
        (b"", b"X"),
        (b"GET /v1/models HTTP/1.1\r\n", b"X: y\r\n"),
        (b"GET /health/live HTTP/1.1\r\nHost: a\r\n\r\n", b"X"),
        (HEAD + b"Content-Length: 100000\r\n\r\n", b"x"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
        (b"POST /v1/nothing HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n", b"x"),
    ],
    ids=["first line", "headers", "second head", "body", "chunked body", "body that nobody reads"],
)
def test_a_client_that_trickles_is_cut(impatient: RunningService, begun: bytes, each: bytes) -> None:
    with connect(impatient) as sock:
        sock.sendall(begun)
        received = trickle(sock, each)
    assert impatient.client.get("/health/live").status_code == 200
    if b"/health" in begun:
        assert received.startswith(b"HTTP/1.1 200")
    elif b"/nothing" in begun:
        assert received.startswith(b"HTTP/1.1 404")
    else:
        assert received.startswith(b"HTTP/1.1 408")
        assert json.loads(received.rpartition(b"\r\n\r\n")[2])["type"] == "urn:solrl:problem:request-timeout"


def test_a_client_that_says_nothing_is_cut(impatient: RunningService) -> None:
    with connect(impatient) as sock:
        assert read_response(sock)[0] == 408
        assert not sock.recv(1)


def test_a_large_body_may_take_longer_than_a_head(impatient: RunningService) -> None:
    """At four times the least rate, for twice the time: slow, but not slow on purpose."""
    body = b'{"model": "' + b"x" * (2 * 4 * 16 * 1024) + b'"}'
    with connect(impatient) as sock:
        sock.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body))
        for start in range(0, len(body), 4096):
            sock.sendall(body[start : start + 4096])
            time.sleep(2 * 4096 / (2 * 4 * 16 * 1024))
        assert read_response(sock)[0] == 422


def test_a_client_that_takes_no_answer_is_cut(impatient: RunningService) -> None:
    sock = socket.socket()
    with sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", impatient.port))
        sock.settimeout(60)
        request = b"GET /openapi.json HTTP/1.1\r\nHost: a\r\n\r\n"
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while True:  # more answers than any buffer holds, none of them read
                sock.sendall(request * 20)
    assert "does not take its answer" in impatient.log.read_text()


def test_two_hundred_slow_clients_leave_the_healthy_ones_alone(impatient: RunningService) -> None:
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(connect(impatient)) for _ in range(200)]
        for i, sock in enumerate(slow):
            sock.sendall((HEAD + b"Content-Length: 100000\r\n\r\n{") if i % 2 else b"GET /v1/mod")
        assert impatient.rollout(count=2, steps=1)
        for sock in slow:
            assert read_response(sock)[0] == 408


def test_one_connection_too_many_is_told_so(impatient: RunningService) -> None:
    with contextlib.ExitStack() as stack:
        answers = []
        for _ in range(CONNECTIONS + 20):
            sock = stack.enter_context(connect(impatient))
            sock.sendall(b"G")
            answers.append(sock)
        statuses = [read_response(sock)[0] for sock in answers]
    assert set(statuses) == {408, 503}
    assert statuses.count(503) >= 20
    assert impatient.client.get("/health/ready").status_code == 200
