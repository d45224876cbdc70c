"""A full queue refuses requests by their head, after the check of access, and only those that queue work."""

import json
import socket
import time
from contextlib import ExitStack
from pathlib import Path

from solrl_proto.rollouts import STREAM_MEDIA_TYPE
from tests.services.security_helpers import Guarded, guarded_service, raw
from tests.support.service_helpers import read_response, rollout_request

QUOTA, LIMIT = 24, 48


def accepted(guarded: Guarded, token: str, count: int) -> socket.socket:
    """The connection of a streamed request whose work was accepted."""
    body = json.dumps(rollout_request(count=count, steps=200)).encode()
    sock = socket.create_connection(("127.0.0.1", guarded.service.port), timeout=600)
    accept = f"\r\nAccept: {STREAM_MEDIA_TYPE}\r\n\r\n"
    sock.sendall(head(guarded, token, len(body)).replace("\n", "\r\n").encode() + accept.encode() + body)
    assert sock.recv(4096).startswith(b"HTTP/1.1 200")
    return sock


def head(guarded: Guarded, token: str, size: int) -> str:
    secret = guarded.tokens.get(token, token)
    lines = "POST /v1/rollouts HTTP/1.1\nHost: localhost"
    return f"{lines}\nContent-Type: application/json\nContent-Length: {size}\nAuthorization: Bearer {secret}"


def waiting(guarded: Guarded) -> float:
    text = guarded.service.client.get("/metrics", headers=guarded.headers("admin")).text
    lines = [line for line in text.splitlines() if line.startswith("solrl_queue_candidates{")]
    return sum(float(line.split()[-1]) for line in lines)


def refused(guarded: Guarded, token: str) -> dict[str, str]:
    """The problem in the answer to a head whose body is never sent."""
    status, headers, body = raw(guarded.service.port, head(guarded, token, 1000))
    document: dict[str, str] = json.loads(body)
    assert (status, document["type"]) == (429, "urn:solrl:problem:queue-full")
    assert headers["content-type"] == "application/problem+json"
    assert 1 <= int(headers["retry-after"]) <= 60
    return document


def test_a_full_queue_refuses_work_before_a_body_is_sent(tmp_path: Path) -> None:
    limits = ("--queue-limit", str(LIMIT), "--tenant-queue-limit", str(QUOTA))
    with guarded_service(tmp_path, *limits) as guarded, ExitStack() as held:
        held.enter_context(accepted(guarded, "a", QUOTA))
        while waiting(guarded):  # until it runs
            time.sleep(0.05)
        held.enter_context(accepted(guarded, "a", QUOTA))
        assert refused(guarded, "a")["detail"].startswith(f"tenant 'a' has {QUOTA} candidates waiting already")
        held.enter_context(accepted(guarded, "b", LIMIT - QUOTA))
        for token in ("a", "b", "rollout"):
            document = refused(guarded, token)
            assert document["detail"].startswith(f"there are {LIMIT} candidates waiting already")
            assert document["expected"] == "at most 0 more candidates now"
            assert "later" in document["action"]
        # Requests that queue nothing are served.
        for path in ("/v1/status", "/v1/models", "/v1/runs", "/health/live"):
            assert guarded.service.client.get(path, headers=guarded.headers("a")).status_code == 200
        assert guarded.service.client.post("/v1/nothing", headers=guarded.headers("a")).status_code == 404
        # A client may still send a refused body and keep the connection.
        with socket.create_connection(("127.0.0.1", guarded.service.port), timeout=600) as sock:
            for _ in range(2):
                sock.sendall(head(guarded, "b", 1000).replace("\n", "\r\n").encode() + b"\r\n\r\n")
                assert read_response(sock)[0] == 429
                sock.sendall(b"x" * 1000)
            sock.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert read_response(sock)[0] == 200
