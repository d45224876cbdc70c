"""Oversized heads and bodies, and names with a meaning in file systems."""

import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from solrl_proto.adapters import ADAPTER_MEDIA_TYPE
from tests.services.security_helpers import Guarded, raw
from tests.support.service_helpers import (
    MODEL,
    RunningService,
    problem,
    read_response,
    rollout_request,
    running_service,
)

MIB = 2**20
LIMIT = 64 * MIB
DIGEST = "Content-Digest: sha-256=:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=:"


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    limits = ["--max-body-bytes", str(LIMIT), "--max-adapter-bytes", str(LIMIT)]
    with running_service(*limits, "--rewards", "clipscore", "verifier", "judge") as running:
        yield running


def memory(service: RunningService, kind: str) -> int:
    """Bytes of a process's memory: `VmRSS` is the current, `VmHWM` the peak value."""
    status = Path(f"/proc/{service.process.pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(kind))


def send_until_refused(sock: socket.socket, chunked: bool, size: int) -> None:
    part = b"x" * MIB
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for _ in range(size // MIB):
            sock.sendall(b"%x\r\n%b\r\n" % (MIB, part) if chunked else part)


@pytest.mark.parametrize("chunked", [True, False], ids=["chunked", "declared"])
@pytest.mark.parametrize(
    ("method", "path", "media_type"),
    [
        ("POST", "/v1/rollouts", "application/json"),
        ("PUT", f"/v1/runs/big/adapters/0?model={MODEL}", ADAPTER_MEDIA_TYPE),
    ],
    ids=["json", "adapter"],
)
def test_an_oversized_body_uses_no_more_memory_than_the_limit(
    service: RunningService, method: str, path: str, media_type: str, chunked: bool
) -> None:
    # Reset the peak first, so that loading the model does not hide later peaks.
    Path(f"/proc/{service.process.pid}/clear_refs").write_text("5")
    before = memory(service, "VmRSS")
    size = 4 * LIMIT
    length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {size}"
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {media_type}\r\n{DIGEST}\r\n{length}"
    with socket.create_connection(("127.0.0.1", service.port), timeout=600) as sock:
        sock.sendall(head.encode() + b"\r\n\r\n")
        send_until_refused(sock, chunked, size)
        status, _, body = read_response(sock)
    assert (status, json.loads(body)["type"]) == (413, "urn:solrl:problem:body-too-large")
    assert memory(service, "VmHWM") - before <= LIMIT + 64 * MIB


@pytest.mark.parametrize("method", ["GET", "DELETE", "HEAD", "OPTIONS", "PATCH"])
def test_an_unexpected_body_is_harmless(service: RunningService, method: str) -> None:
    head = f"{method} /v1/models HTTP/1.1\nHost: localhost\nContent-Length: {100 * LIMIT}"
    status = raw(service.port, head, b"x" * 1000, has_body=method != "HEAD")[0]
    assert status == (200 if method == "GET" else 405)


@pytest.mark.parametrize("size", [20_000, 200_000, 5_000_000], ids=str)
@pytest.mark.parametrize("where", ["header", "headers", "path", "query"])
def test_a_head_too_large_is_refused(service: RunningService, where: str, size: int) -> None:
    head = {
        "header": "GET /v1/models HTTP/1.1\nHost: localhost\nX-Bomb: " + "x" * size,
        "headers": "GET /v1/models HTTP/1.1\nHost: localhost" + "\nX: y" * (size // 6),
        "path": f"GET /v1/{'x' * size} HTTP/1.1\nHost: localhost",
        "query": f"GET /v1/models?{'x' * size} HTTP/1.1\nHost: localhost",
    }[where]
    try:
        status, _, body = raw(service.port, head)
    except (BrokenPipeError, ConnectionResetError):
        assert size > 40_000  # refused and disconnected while it was still being sent
        return
    if size < 32_768:
        assert status in (200, 404, 422)  # the API has no such parameter
    elif status != 400:  # uvicorn's own answer to a head that arrives in several parts
        assert (status, json.loads(body)["type"]) == (431, "urn:solrl:problem:head-too-large")


ODD = (
    *("..", "../..", "%2e%2e%2f%2e%2e%2fetc%2fpasswd", "..%2f..%2ftokens.json", "%252e%252e", "..%5c..", "a%00"),
    *("a%0d%0aX-Injected:%201", "%F0%9F%8E%A8", "%ff%fe", "%C0%AE%C0%AE", "a#b", "{run}", "%", "a%20b"),
    "%EF%BC%8E%EF%BC%8E",
)


@pytest.mark.parametrize("name", ODD)
def test_odd_names_are_refused_and_touch_no_file(guarded: Guarded, name: str) -> None:
    before = {path: path.stat().st_mtime_ns for path in guarded.file.parent.rglob("*")}
    login = f"Authorization: Bearer {guarded.tokens['a']}"
    typed = f"Content-Type: {ADAPTER_MEDIA_TYPE}"
    places = [f"{name}/adapters/0", f"{name}/adapters", f"{name}/adapters/0/weights", f"a/adapters/{name}", name]
    for place in places:
        for method in ("GET", "PUT", "DELETE"):
            target = f"/v1/runs/{place}{'?model=' + MODEL if method == 'PUT' else ''}"
            head = f"{method} {target} HTTP/1.1\nHost: localhost\n{login}\n{DIGEST}\n{typed}\nContent-Length: 1"
            status, headers, body = raw(guarded.service.port, head, b"x")
            assert status in (404, 405, 422), (method, target, body)
            assert headers["content-type"] == "application/problem+json"
            assert "x-injected" not in headers
            assert json.loads(body)["status"] == status
    assert {path: path.stat().st_mtime_ns for path in guarded.file.parent.rglob("*")} == before
    assert guarded.service.client.get("/v1/runs", headers=guarded.headers("a")).status_code in (200, 404)


@pytest.mark.parametrize("part", ["{},", '"a",'])
def test_json_that_takes_much_memory_is_refused_before_it_is_parsed(service: RunningService, part: str) -> None:
    body = b'{"prompts":[{"id":"a","text":"b","metadata":{"a":[' + part.encode() * 5_000_000 + b"0]}}]}"
    headers = {"Content-Type": "application/json; charset=utf-8"}
    found = problem(service.client.post("/v1/rollouts", content=body, headers=headers))
    assert (found["status"], found["kind"], found["where"]) == (413, "body-too-large", "body")
    assert found["expected"] == "at most 67108864 bytes"


ONE = {"class": "circle", "color": "red", "count": 1}


@pytest.mark.parametrize("reward", ["verifier", "judge"])
@pytest.mark.parametrize(
    ("include", "field"),
    [
        *[([ONE | {"count": count}], "0.count") for count in (10**7, 10**30, 10**400, 17, 0, -1, True, 1.0, None, "1")],
        ([ONE] * 200, ""),
        ([ONE, ONE | {"position": ["above", 10**30]}], "1.position"),
        ([ONE | {"class": "x" * 10_000}], "0.class"),
    ],
)
def test_numbers_of_metadata_are_bounded_before_anything_is_queued(
    service: RunningService, reward: str, include: list[object], field: str
) -> None:
    Path(f"/proc/{service.process.pid}/clear_refs").write_text("5")
    before = memory(service, "VmRSS")
    prompts = [{"id": "a", "text": "x", "metadata": {"include": one}} for one in ([ONE], include)]
    prompts[0]["id"] = "b"
    body = rollout_request(steps=1) | {"prompts": prompts, "rewards": [{"name": reward}]}
    refused = service.client.post("/v1/rollouts", json=body)
    found = problem(refused)
    where = f"body.prompts.1.metadata.include.{field}".rstrip(".")
    assert (found["status"], found["kind"], found["where"]) == (422, "invalid-request", where)
    assert reward in found["detail"]
    assert found["got"] is not None
    assert found["expected"]
    assert len(refused.content) < 2_000
    assert memory(service, "VmHWM") - before < 300 * MIB
    assert service.client.get("/health/live").status_code == 200
