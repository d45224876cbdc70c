"""One service behind tokens for all tests of this folder that only ask it things."""

from collections.abc import Iterator

import pytest
from security_helpers import Guarded, guarded_service
from service_helpers import MODEL, Layout
from solrl_core.families import load_backbone
from solrl_core.lora import adapter_layout


@pytest.fixture(scope="session")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with guarded_service(tmp_path_factory.mktemp("tokens"), "--log-format", "json") as running:
        yield running
        assert "Traceback" not in running.service.log.read_text()


@pytest.fixture(scope="session")
def layout() -> Layout:
    backbone = load_backbone(MODEL)
    return adapter_layout(backbone.transformer, backbone.lora_targets)
