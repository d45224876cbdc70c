"""The FastAPI application."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from solrl_proto.problems import Problem

from solrl_rollout import problems
from solrl_rollout.limits import JsonBodyLimit
from solrl_rollout.routes import adapters, health, models, rollouts
from solrl_rollout.service import running
from solrl_rollout.settings import Settings


def create_app(settings: Settings) -> FastAPI:
    """The service as an ASGI application; its lifespan loads the model and stops the engine.

    `app.state.service` is the running `Service`. What keeps it from starting is raised out of the lifespan.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with running(settings) as service:
            app.state.service = service
            yield
            service.draining = True

    app = FastAPI(
        title="solrl rollout service",
        version=version("solrl"),
        description="Explores candidates of text-to-image models: prompts and group size in, seeds and proxy "
        "rewards out. Errors are RFC 9457 problem documents.",
        lifespan=lifespan,
    )
    problems.install(app)
    app.add_middleware(JsonBodyLimit, limit=settings.max_body_bytes)
    for module in (health, models, adapters, rollouts):
        app.include_router(module.router)
    app.openapi = lambda: _describe(app)  # type: ignore[method-assign]
    return app


def _describe(app: FastAPI) -> dict[str, Any]:
    """FastAPI's description, with the schema of problem documents that the routes refer to."""
    if app.openapi_schema is None:
        described = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        described["components"]["schemas"]["Problem"] = Problem.model_json_schema()
        app.openapi_schema = described
    return app.openapi_schema
