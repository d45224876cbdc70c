"""The published contract is the service's."""

from pathlib import Path

from service_helpers import RunningService
from solrl_rollout.openapi import document

PUBLISHED = Path(__file__).parents[3] / "proto" / "openapi.json"


def test_the_published_contract_is_current() -> None:
    assert PUBLISHED.read_text() == document(), "python -m solrl_rollout.openapi > proto/openapi.json"


def test_a_running_service_publishes_it(service: RunningService) -> None:
    response = service.client.get("/openapi.json").json()
    assert set(response["paths"]) == {
        "/health/live",
        "/health/ready",
        "/metrics",
        "/v1/models",
        "/v1/rollouts",
        "/v1/runs",
        "/v1/runs/{run}",
        "/v1/runs/{run}/activity",
        "/v1/runs/{run}/adapters",
        "/v1/runs/{run}/adapters/{version}",
        "/v1/runs/{run}/adapters/{version}/pin",
        "/v1/runs/{run}/adapters/{version}/weights",
        "/v1/runs/{run}/iterations",
        "/v1/status",
    }
    assert "Problem" in response["components"]["schemas"]
    assert service.client.get("/docs").status_code == 200
