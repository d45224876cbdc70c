"""Adapters over HTTP: valid ones are stored and served; invalid ones change nothing.

Benchmarks' row `corrupted`, of test_fault_rows.py, pushes every kind of damaged file.
"""

import socket
from collections.abc import Iterator

import pytest
from solrl_proto.adapters import ADAPTER_MEDIA_TYPE, AdapterInfo, AdapterList, RunList, adapter_digest
from tests.support.adapters import content_digest
from tests.support.service_helpers import Layout, RunningService, adapter_file, problem, rollout_request, scores

STEADY = ("steady", 1)
TYPED = {"Content-Type": ADAPTER_MEDIA_TYPE}


@pytest.fixture(scope="module")
def steady(service: RunningService, layout: Layout) -> list[list[float]]:
    """Scores under an adapter that stays in use during the test."""
    assert service.push(*STEADY, adapter_file(layout, 100)).status_code == 201
    return scores(service.rollout(adapter=STEADY))


@pytest.fixture
def unchanged(service: RunningService, steady: list[list[float]]) -> Iterator[None]:
    """After the test, the adapter in use still gives the same scores, bit for bit."""
    yield
    assert scores(service.rollout(adapter=STEADY)) == steady


def test_an_adapter_is_stored_and_read_back(service: RunningService, layout: Layout) -> None:
    body, client = adapter_file(layout, 1), service.client
    response = service.push("readback", 3, body)
    assert response.status_code == 201
    info = AdapterInfo.model_validate(response.json())
    assert (info.run, info.version, info.parent, info.model) == ("readback", 3, None, "mini-sana")
    assert (info.digest, info.size, info.modules) == (adapter_digest(body), len(body), len(layout))
    assert (info.rank, info.alpha) == (2, 2.0)
    assert client.get("/v1/runs/readback/adapters/3").json() == response.json()
    weights = client.get("/v1/runs/readback/adapters/3/weights")
    assert weights.content == body
    assert weights.headers["content-digest"] == content_digest(body)
    again = service.push("readback", 3, body)
    assert (again.status_code, again.json()) == (200, response.json())
    for version, kind in ((3, "version-conflict"), (4, "parent-conflict")):
        conflict = service.push("readback", version, adapter_file(layout, 2))
        assert (conflict.status_code, problem(conflict)["kind"]) == (409, kind)
    assert service.push("readback", 5, adapter_file(layout, 2), parent=3).status_code == 201
    held = AdapterList.model_validate(client.get("/v1/runs/readback/adapters").json())
    assert (held.head, [one.version for one in held.versions]) == (5, [3, 5])


@pytest.mark.parametrize("header", ["", "sha-256=", "sha-256=:AAAA:", "md5=:" + "A" * 43 + "=:", "sha-256=:é:"])
def test_a_garbled_digest_header_is_refused(service: RunningService, layout: Layout, header: str) -> None:
    body = adapter_file(layout, 1)
    target = "/v1/runs/refused/adapters/1?model=mini-sana"
    response = service.client.put(target, content=body, headers=TYPED | {"Content-Digest": header.encode()})
    assert (response.status_code, problem(response)["kind"]) == (422, "digest-header")
    assert problem(response)["where"] == "header.Content-Digest"


@pytest.mark.usefixtures("unchanged")
def test_an_interrupted_upload_stores_nothing(service: RunningService, layout: Layout) -> None:
    body = adapter_file(layout, 1)
    with socket.create_connection(("127.0.0.1", service.port)) as sock:
        sock.sendall(
            f"PUT /v1/runs/broken/adapters/1?model=mini-sana HTTP/1.1\r\nHost: localhost\r\n"
            f"Content-Type: {ADAPTER_MEDIA_TYPE}\r\n"
            f"Content-Digest: {content_digest(body)}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        )
        sock.sendall(body[: len(body) // 2])
    assert service.client.get("/v1/runs/broken/adapters/1").status_code == 404


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize(
    ("size", "kind"), [("1e12", "adapter-nonfinite"), ("1e18", "adapter-nonfinite"), ("1e25", "adapter-merge")]
)
def test_an_overflowing_adapter_is_refused_in_use(
    service: RunningService, layout: Layout, size: str, kind: str
) -> None:
    assert service.push(f"huge-{size}", 1, adapter_file(layout, 1, size=float(size))).status_code == 201
    response = service.client.post("/v1/rollouts", json=rollout_request(adapter=(f"huge-{size}", 1)))
    assert (response.status_code, problem(response)["kind"]) == (422, kind)
    assert kind == "adapter-nonfinite" or "transformer_blocks" in problem(response)["detail"]


@pytest.mark.parametrize(
    ("version", "query", "where"),
    [
        *((version, {}, "path.version") for version in ("-1", "latest", str(2**53))),
        ("1", {"parent": "x"}, "query.parent"),
        ("1", {"model": "../x"}, "query.model"),
        ("1", {"model": None}, "query.model"),
        ("1", {"model": "maxi-sana"}, "model"),
    ],
)
def test_an_invalid_parameter_is_named_and_the_hosted_models(
    service: RunningService, version: str, query: dict[str, str], where: str
) -> None:
    found = problem(service.put(f"/v1/runs/refused/adapters/{version}", b"x", **query))
    assert (found["status"], found["where"]) == (404 if where == "model" else 422, where)
    assert where != "model" or (found["kind"], found["expected"]) == ("model-not-found", ["mini-sana"])


def test_runs_are_rewound_listed_and_deleted(service: RunningService, layout: Layout) -> None:
    client, adapters = service.client, "/v1/runs/ends/adapters"
    for version in (0, 1):
        assert service.push("ends", version, adapter_file(layout, version), version - 1 if version else None).is_success
    refused = (({"head": 1}, 422, "query.after"), ({"after": 7, "head": 1}, 404, "version"))
    for query, status, where in (*refused, ({"after": 0, "head": 2}, 409, "head")):
        response = client.delete(adapters, params=query)
        assert (response.status_code, problem(response)["where"]) == (status, where)
    assert client.delete(adapters, params={"after": 0, "head": 1}).status_code == 204
    assert client.get(adapters).json()["head"] == 0
    assert service.push("ends", 1, adapter_file(layout, 2), 0).status_code == 201
    listed = RunList.model_validate(client.get("/v1/runs").json())
    (run,) = [run for run in listed.runs if run.run == "ends"]
    assert (run.head, len(run.versions)) == (1, 2)
    assert listed.size == sum(info.size for run in listed.runs for info in run.versions)
    assert client.delete("/v1/runs/ends").status_code == 204
    for response in (client.delete("/v1/runs/ends"), client.get(f"{adapters}/1")):
        assert (response.status_code, problem(response)["kind"]) == (404, "run-not-found")
