"""The published contract is the service's."""

import json
from pathlib import Path

from service_helpers import RunningService
from solrl_rollout.openapi import document

PUBLISHED = Path(__file__).parents[3] / "proto" / "openapi.json"


def test_the_published_contract_is_current() -> None:
    assert PUBLISHED.read_text() == document(), "python -m solrl_rollout.openapi > proto/openapi.json"


def test_a_running_service_publishes_it(service: RunningService) -> None:
    assert service.client.get("/openapi.json").json() == json.loads(PUBLISHED.read_text())
