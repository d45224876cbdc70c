"""Workers, which generate and score the engine's chunks behind one protocol."""

from solrl_rollout.engine.backends.base import BackendLoader
from solrl_rollout.engine.workers.base import Worker
from solrl_rollout.engine.workers.local import LocalWorker
from solrl_rollout.settings import Settings
from solrl_rollout.status.metrics import Metrics

__all__ = ["Worker", "make_workers"]


def make_workers(settings: Settings, metrics: Metrics, load_backend: BackendLoader) -> list[Worker]:
    """The workers of the settings, not loaded yet."""
    return [LocalWorker(settings, metrics, load_backend)]
