"""The published contract is the service's."""

import json
from pathlib import Path

from service_helpers import RunningService
from solrl_rollout.openapi import document

PUBLISHED = Path(__file__).parents[3] / "proto" / "openapi.json"


def test_the_published_contract_is_current_and_that_of_a_running_service(service: RunningService) -> None:
    assert PUBLISHED.read_text() == document(), "python -m solrl_rollout.openapi > proto/openapi.json"
    assert service.client.get("/openapi.json").json() == json.loads(PUBLISHED.read_text())
