"""One real service for all tests of this folder that only ask it things, and its backbone in this process."""

from collections.abc import Iterator

import pytest
from service_helpers import BODY_LIMIT, MODEL, QUEUE_LIMIT, Layout, RunningService, running_service
from solrl_core.families import Backbone, load_backbone
from solrl_core.lora import adapter_layout


@pytest.fixture(scope="session")
def service() -> Iterator[RunningService]:
    """A service with adapters in its memory and small limits."""
    limits = ["--max-adapter-bytes", str(BODY_LIMIT), "--queue-limit", str(QUEUE_LIMIT)]
    with running_service(*limits, "--max-body-bytes", str(BODY_LIMIT)) as running:
        yield running
        assert "Traceback" not in running.log.read_text()


@pytest.fixture(scope="session")
def backbone() -> Backbone:
    return load_backbone(MODEL)


@pytest.fixture(scope="session")
def layout(backbone: Backbone) -> Layout:
    return adapter_layout(backbone.transformer, backbone.lora_targets)
