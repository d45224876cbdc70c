"""Pages of other sites cannot use a browser's access to the service."""

import json
from pathlib import Path

import pytest
import yaml
from solrl_proto.adapters import ADAPTER_MEDIA_TYPE
from tests.services.iteration_helpers import report
from tests.services.security_helpers import Guarded, raw
from tests.support.service_helpers import MODEL, Layout, RunningService, adapter_file, adapter_headers, problem

JSON = "application/json"


def post(service: RunningService, run: str, *headers: str, host: str = "localhost") -> tuple[int, str]:
    """Status and problem kind of a POST of an iteration."""
    body = report(0).model_dump_json().encode()
    lines = [f"POST /v1/runs/{run}/iterations HTTP/1.1", f"Host: {host}", f"Content-Length: {len(body)}", *headers]
    status, _, answer = raw(service.port, "\n".join(lines), body)
    return status, json.loads(answer)["type"].rpartition(":")[2] if answer else ""


@pytest.fixture(scope="module")
def told(service: RunningService, layout: Layout) -> str:
    """A run whose iterations can be reported."""
    assert service.push("told", 0, adapter_file(layout, 1)).status_code == 201
    return "told"


@pytest.mark.parametrize(
    "media_type",
    [
        *(None, "text/plain", "text/plain;charset=UTF-8", "application/x-www-form-urlencoded", "", "json"),
        f"{JSON}\nContent-Type: text/plain",
    ],
)
def test_a_json_body_must_have_its_media_type(service: RunningService, told: str, media_type: str | None) -> None:
    """A page may send the first four to any site without a preflight (`no-cors`)."""
    headers = [] if media_type is None else [f"Content-Type: {media_type}"]
    assert post(service, told, *headers) == (415, "unsupported-media-type")
    assert service.client.get(f"/v1/runs/{told}/iterations").json()["curve"]["iterations"] == []


@pytest.mark.parametrize(
    ("media_type", "status"), [(None, 415), (JSON, 415), ("application/octet-stream", 200), (ADAPTER_MEDIA_TYPE, 200)]
)
def test_an_adapter_must_have_its_media_type(
    service: RunningService, told: str, layout: Layout, media_type: str | None, status: int
) -> None:
    body = adapter_file(layout, 1)
    headers = {name: value for name, value in (adapter_headers(body) | {"Content-Type": media_type}).items() if value}
    target = f"/v1/runs/{told}/adapters/0?model={MODEL}"
    answer = service.client.put(target, content=body, headers=headers)
    assert answer.status_code == status
    if status == 415:
        assert problem(answer)["kind"] == "unsupported-media-type"
        assert ADAPTER_MEDIA_TYPE in problem(answer)["expected"]


@pytest.mark.parametrize(
    "origin",
    [
        *("null", "http://evil.org", "http://localhost:8100.evil.org", "http://localhost:8100@evil.org", "file://"),
        "http://localhost:8100\nOrigin: http://localhost:8100",
    ],
)
@pytest.mark.parametrize("target", ["GET /v1/runs", "GET /health/live", "DELETE /v1/runs/told/adapters?after=0&head=0"])
def test_another_origin_is_refused(service: RunningService, origin: str, target: str) -> None:
    head = f"{target} HTTP/1.1\nHost: localhost:8100\nOrigin: {origin}"
    status, _, body = raw(service.port, head)
    assert (status, json.loads(body)["type"]) == (403, "urn:solrl:problem:foreign-origin")


def test_with_tokens_the_proxy_chooses_the_host_and_another_origin_is_refused(guarded: Guarded) -> None:
    headers = guarded.headers("a") | {"Host": "rollouts.example.org"}
    assert guarded.service.client.get("/v1/runs", headers=headers).status_code == 200
    refused = guarded.service.client.get("/v1/runs", headers=guarded.headers("a") | {"Origin": "https://evil.org"})
    assert (refused.status_code, problem(refused)["kind"]) == (403, "foreign-origin")


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        *(("localhost:8100", f"{origin}:8100") for origin in ("http://localhost", "HTTP://LocalHost")),
        *(("[::1]:8100", "http://[::1]:8100"), ("gpu-node", "https://gpu-node"), ("gpu-node", "http://gpu-node")),
        ("gpu-node:443", "https://gpu-node"),
        *((host, None) for host in ("localhost", "LOCALHOST:80", "a.localhost", "127.0.0.1:8100", "127.9.9.9")),
        *((host, None) for host in ("[::1]:1", "GPU-node.", "10.1.2.3")),
    ],
)
def test_the_service_s_hosts_and_origins_are_allowed(service: RunningService, host: str, origin: str | None) -> None:
    head = f"GET /v1/runs HTTP/1.1\nHost: {host}" + ("" if origin is None else f"\nOrigin: {origin}")
    assert raw(service.port, head)[0] == 200


@pytest.mark.parametrize(
    "host",
    ["evil.org", "evil.org:8100", "rebound", "10.9.9.9", "localhost.evil.org", "127.0.0.1.evil.org", "[::2]", ""],
)
def test_without_tokens_another_host_is_refused(service: RunningService, host: str) -> None:
    """A site can resolve its name to this machine, so that its page has our origin (DNS rebinding)."""
    status, _, body = raw(service.port, f"GET /v1/runs HTTP/1.1\nHost: {host}\nOrigin: http://{host}")
    assert (status, json.loads(body)["type"]) == (403, "urn:solrl:problem:host-not-local")
    assert "SOLRL_ALLOWED_HOSTS" in json.loads(body)["action"]


def test_compose_lists_its_service_as_an_allowed_host() -> None:
    compose = yaml.safe_load((Path(__file__).parents[3] / "docker-compose.yml").read_text())
    for name, service in compose["services"].items():
        if service.get("environment", {}).get("SOLRL_ALLOW_ANONYMOUS"):
            assert name in service["environment"]["SOLRL_ALLOWED_HOSTS"].split(",")
