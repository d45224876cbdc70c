"""The FastAPI application of the rollout service."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from solrl_http.app import make_app
from solrl_proto.rollouts import StreamLine
from solrl_proto.status import Activity, IterationReport

from solrl_rollout.engine.backends import BackendLoader, load_backend
from solrl_rollout.http.routes import adapters, health, models, page, rollouts, status
from solrl_rollout.service import running_service
from solrl_rollout.settings import RolloutSettings
from solrl_rollout.status.rollout_metrics import RolloutMetrics


def create_app(settings: RolloutSettings, *, load_backend: BackendLoader = load_backend) -> FastAPI:
    """The service as an ASGI application, whose lifespan loads the models and stops the engine.

    `app.state.service` is the running `Service`, `app.state.metrics` its metrics. The lifespan raises errors that
    prevent the service from starting.

    Raises:
        TokenFileError: the settings name a token file that cannot be used.
    """
    service_metrics = RolloutMetrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with running_service(settings, service_metrics, load_backend) as service:
            app.state.service = service
            yield
            service.draining = True

    return make_app(
        "solrl rollout service",
        "Explores candidates of text-to-image models: prompts and group size in, seeds and proxy "
        "rewards out. Errors are RFC 9457 problem documents.",
        (page, health, models, adapters, rollouts, status),
        settings,
        service_metrics,
        lifespan,
        documented={"StreamLine": StreamLine, "IterationReport": IterationReport, "Activity": Activity},
    )
