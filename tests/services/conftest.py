"""Real services of the smaller miniature that the tests in this folder share, and its backbone in this process."""

from collections.abc import AsyncIterator, Iterator

import pytest
from solrl_core.families import Backbone, load_backbone
from solrl_core.lora import adapter_layout
from solrl_rollout.store import RunStore, open_store
from tests.services.security_helpers import Guarded, guarded_service
from tests.support.service_helpers import BODY_LIMIT, QUEUE_LIMIT, Layout, RunningService, running_service
from tests.support.small_model import small_model


@pytest.fixture(scope="session")
def service() -> Iterator[RunningService]:
    """A service with an in-memory store and small limits, which is also `gpu-node`."""
    limits = ["--max-adapter-bytes", str(BODY_LIMIT), "--queue-limit", str(QUEUE_LIMIT)]
    limits += ["--allowed-hosts", "gpu-node", "10.1.2.3"]
    with running_service(*limits, "--max-body-bytes", str(BODY_LIMIT), model=small_model()) as running:
        yield running
        assert "Traceback" not in running.log.read_text()


@pytest.fixture(scope="session")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """A service that requires tokens."""
    with guarded_service(tmp_path_factory.mktemp("tokens"), "--log-format", "json", model=small_model()) as running:
        yield running
        assert "Traceback" not in running.service.log.read_text()


@pytest.fixture(params=["memory://", "protocol=2", "protocol=3"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[RunStore]:
    """An empty store of each kind, which retains three versions; Redis by either protocol, as in `redis_store`."""
    url = request.param
    if url != "memory://":
        url = f"{request.getfixturevalue('empty_redis_url')}?{url}"
    opened = open_store(url, retain=3)
    yield opened
    await opened.close()


@pytest.fixture(scope="session")
def backbone() -> Backbone:
    return load_backbone(small_model())


@pytest.fixture(scope="session")
def layout(backbone: Backbone) -> Layout:
    return adapter_layout(backbone.transformer, backbone.lora_targets)
