"""Clients that never finish a head, a body or an answer do not affect healthy ones."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
from service_helpers import RunningService, read_response, running_service
from solrl_http.limits.connections import ConnectionLimits, GuardedProtocol
from solrl_http.serving import bind

HEAD = b"POST /v1/rollouts HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def impatient() -> Iterator[RunningService]:
    """A service that waits for a client for at most a second."""
    flags = ["--slow-client-timeout", "1", "--keep-alive-timeout", "1"]
    with running_service(*flags) as running:
        yield running
        assert "Traceback" not in running.log.read_text()


def connect(service: RunningService) -> socket.socket:
    return socket.create_connection(("127.0.0.1", service.port), timeout=600)


def trickle(sock: socket.socket, bytes_a_time: bytes = b"x") -> bytes:
    """Send small pieces until the other side answers; returns the answer."""
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
        (b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n", b"X"),
        (HEAD + b"Content-Length: 100000\r\n\r\n", b"x"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
        (b"POST /v1/nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n", b"x"),
    ],
    ids=["first line", "headers", "second head", "body", "chunked body", "body that nobody reads"],
)
def test_a_client_that_trickles_is_disconnected(impatient: RunningService, begun: bytes, each: bytes) -> None:
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


def test_a_silent_client_is_disconnected(impatient: RunningService) -> None:
    with connect(impatient) as sock:
        assert read_response(sock)[0] == 408
        assert not sock.recv(1)


def test_a_large_body_may_take_longer_than_a_head(impatient: RunningService) -> None:
    """In each second 16 pieces, of which one is enough, for twice the timeout: slow, but not malicious."""
    piece = 16 * 1024
    body = b'{"model": "' + b"x" * (2 * 16 * piece) + b'"}'
    with connect(impatient) as sock:
        sock.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body))
        for start in range(0, len(body), piece):
            sock.sendall(body[start : start + piece])
            time.sleep(1 / 16)
        assert read_response(sock)[0] == 422


def test_a_client_that_falls_silent_after_much_data_is_disconnected(impatient: RunningService) -> None:
    """Its time limit does not grow with the data sent before."""
    with connect(impatient) as sock:
        sock.sendall(HEAD + b"Content-Length: 16000000\r\n\r\n" + b" " * 8_000_000)
        assert read_response(sock)[0] == 408


def test_a_client_that_does_not_read_its_answer_is_disconnected(impatient: RunningService) -> None:
    sock = socket.socket()
    with sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", impatient.port))
        sock.settimeout(60)
        request = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while True:  # more answers than fit into any buffer, none of them read
                sock.sendall(request * 20)
    assert "does not read its answer" in impatient.log.read_text()


def test_two_hundred_slow_clients_do_not_affect_healthy_ones(impatient: RunningService) -> None:
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(connect(impatient)) for _ in range(200)]
        for i, sock in enumerate(slow):
            sock.sendall((HEAD + b"Content-Length: 100000\r\n\r\n{") if i % 2 else b"GET /v1/mod")
        assert impatient.rollout(count=2, steps=1)
        for sock in slow:
            assert read_response(sock)[0] == 408


@contextlib.contextmanager
def crowded(connections: int) -> Iterator[tuple[str, int]]:
    """Address of a server with this many connections, which stay open during the test."""

    class Protocol(GuardedProtocol):
        limits = ConnectionLimits(slow=600, connections=connections)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    server = uvicorn.Server(uvicorn.Config(app, http=Protocol, ws="none", lifespan="off", log_config=None))
    with contextlib.closing(bind("127.0.0.1", 0)) as listener:
        listener.listen()
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield listener.getsockname()
        finally:
            server.should_exit = True
            thread.join()


def test_one_connection_too_many_gets_an_answer() -> None:
    with crowded(4) as address, contextlib.ExitStack() as stack:
        held, refused = ([socket.create_connection(address, timeout=600) for _ in range(4)] for _ in range(2))
        for sock in (*held, *refused):
            stack.enter_context(sock)
        for sock in refused:
            status, _, body = read_response(sock)
            assert (status, json.loads(body)["type"]) == (503, "urn:solrl:problem:too-many-connections")
        for sock in held:
            sock.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert read_response(sock)[0] == 200
        held.pop().close()
        while True:  # until the server has noticed
            with socket.create_connection(address, timeout=600) as sock:
                sock.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                if read_response(sock)[0] == 200:
                    break
