"""The FastAPI application."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import Depends, FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter
from solrl_proto.problems import Problem
from solrl_proto.rollouts import StreamLine
from solrl_proto.status import IterationReport
from starlette.types import ASGIApp

from solrl_rollout.http import problems
from solrl_rollout.http.access import RULES, AccessControl, check_declared
from solrl_rollout.http.backpressure import RefuseWhenFull
from solrl_rollout.http.limits import HeadLimit, JsonBodyLimit
from solrl_rollout.http.request_log import Observed
from solrl_rollout.http.routes import adapters, health, metrics, models, page, rollouts, runs, status
from solrl_rollout.http.routes.common import known_parameters
from solrl_rollout.http.tokens import Keyring
from solrl_rollout.service import running
from solrl_rollout.settings import Settings
from solrl_rollout.status.metrics import Telemetry

_BEARER = {
    "type": "http",
    "scheme": "bearer",
    "description": "A token of `solrl-rollout token create`. Not needed on a service without a token file, "
    "which only its own machine can reach.",
}


class _Application(FastAPI):
    """FastAPI, watched from outside of its own error handling, so that a 500 has its id and its line, too."""

    def build_middleware_stack(self) -> ASGIApp:
        return Observed(super().build_middleware_stack(), self.state.telemetry)


def create_app(settings: Settings) -> FastAPI:
    """The service as an ASGI application; its lifespan loads the model and stops the engine.

    `app.state.service` is the running `Service`, `app.state.telemetry` what it counts. What keeps it from starting
    is raised out of the lifespan.

    Raises:
        TokenFileError: the settings name a token file that cannot be used.
    """
    telemetry = Telemetry()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with running(settings, telemetry) as service:
            app.state.service = service
            yield
            service.draining = True

    app = _Application(
        title="solrl rollout service",
        version=version("solrl"),
        description="Explores candidates of text-to-image models: prompts and group size in, seeds and proxy "
        "rewards out. Errors are RFC 9457 problem documents.",
        lifespan=lifespan,
    )
    app.state.telemetry = telemetry
    problems.install(app)
    app.add_middleware(JsonBodyLimit, limit=settings.max_body_bytes)
    app.add_middleware(RefuseWhenFull)
    app.add_middleware(AccessControl, keyring=Keyring(settings.token_file) if settings.token_file else None)
    app.add_middleware(HeadLimit)
    for module in (page, health, models, runs, adapters, rollouts, status, metrics):
        for route in module.router.routes:
            for method in getattr(route, "methods", None) or ("any method",):
                check_declared(method, getattr(route, "path", str(route)))
        app.include_router(module.router, dependencies=[Depends(known_parameters)])
    app.openapi = lambda: _describe(app)  # type: ignore[method-assign]
    return app


def _describe(app: FastAPI) -> dict[str, Any]:
    """FastAPI's description, with what routes name beside their models: problems, lines of a stream, tokens."""
    if app.openapi_schema is None:
        described = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        schemas = described["components"]["schemas"]
        schemas["Problem"] = Problem.model_json_schema()
        unnamed: dict[str, Any] = {"StreamLine": StreamLine, "IterationReport": IterationReport}
        for name, kind in unnamed.items():
            schema = TypeAdapter(kind).json_schema(ref_template="#/components/schemas/{model}")
            schemas |= {**schema.pop("$defs"), **schemas, name: schema}
        described["components"]["securitySchemes"] = {"bearer": _BEARER}
        for path, methods in described["paths"].items():
            for method, operation in methods.items():
                need = RULES[f"{method.upper()} {path}"]
                if need != "open":
                    # The list is of roles, which OpenAPI 3.1 allows beside a bearer token.
                    operation["security"] = [{"bearer": [] if need == "token" else [need]}]
        app.openapi_schema = described
    return app.openapi_schema
