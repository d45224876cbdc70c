"""The FastAPI application of the rollout service."""

from fastapi import FastAPI
from solrl_http.app import make_app
from solrl_proto.rollouts import StreamLine
from solrl_proto.status import IterationReport

from solrl_rollout.engine.backends import BackendLoader, load_backend
from solrl_rollout.http.routes import adapters, health, page, rollouts, status
from solrl_rollout.service import running_service
from solrl_rollout.settings import RolloutSettings
from solrl_rollout.status.rollout_metrics import RolloutMetrics


def create_app(settings: RolloutSettings, *, load_backend: BackendLoader = load_backend) -> FastAPI:
    """The service as an ASGI application, whose lifespan loads the models. For the error, see `make_app`."""
    metrics = RolloutMetrics()
    return make_app(
        "solrl rollout service",
        "Explores candidates of text-to-image models: prompts and group size in, seeds and proxy "
        "rewards out. Errors are RFC 9457 problem documents.",
        (page, health, adapters, rollouts, status),
        settings,
        metrics,
        lambda: running_service(settings, metrics, load_backend),
        documented={"StreamLine": StreamLine, "IterationReport": IterationReport},
    )
