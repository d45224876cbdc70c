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
from starlette.routing import Route
from starlette.types import ASGIApp

from solrl_rollout.engine.backends import load_backend
from solrl_rollout.engine.backends.base import BackendLoader
from solrl_rollout.http import problems
from solrl_rollout.http.access import AccessControl, Rule, access, access_rules
from solrl_rollout.http.backpressure import Backpressure
from solrl_rollout.http.drain import DrainTimeout
from solrl_rollout.http.hosts import SiteGuard
from solrl_rollout.http.inflight import InflightBytes, InflightLimit
from solrl_rollout.http.limits import HeadLimit, JsonBodyLimit
from solrl_rollout.http.request_log import RequestLog
from solrl_rollout.http.routes import adapters, docs, health, metrics, models, page, rollouts, runs, status
from solrl_rollout.http.routes.common import refuse_unknown_parameters
from solrl_rollout.http.tokens import Keyring
from solrl_rollout.service import running_service
from solrl_rollout.settings import Settings
from solrl_rollout.status.metrics import Metrics

_BEARER = {
    "type": "http",
    "scheme": "bearer",
    "description": "A token from `solrl-rollout token create`. Not needed on a service without a token file, "
    "which only serves its own machine.",
}


class _Application(FastAPI):
    """FastAPI with the request log outside its error handling, so that a 500 is logged with its id, too."""

    def build_middleware_stack(self) -> ASGIApp:
        return RequestLog(DrainTimeout(super().build_middleware_stack()), self.state.metrics)


def create_app(settings: Settings, *, load_backend: BackendLoader = load_backend) -> FastAPI:
    """The service as an ASGI application, whose lifespan loads the models and stops the engine.

    `app.state.service` is the running `Service`, `app.state.metrics` its metrics. The lifespan raises errors that
    prevent the service from starting.

    Raises:
        TokenFileError: the settings name a token file that cannot be used.
    """
    service_metrics = Metrics()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with running_service(settings, service_metrics, load_backend) as service:
            app.state.service = service
            yield
            service.draining = True

    app = _Application(
        title="solrl rollout service",
        version=version("solrl"),
        description="Explores candidates of text-to-image models: prompts and group size in, seeds and proxy "
        "rewards out. Errors are RFC 9457 problem documents.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.state.metrics = service_metrics
    routes = list(app.routes)  # FastAPI's own: the contract
    for route in routes:
        assert isinstance(route, Route)
        access("open")(route.endpoint)
    for module in (page, docs, health, models, runs, adapters, rollouts, status, metrics):
        app.include_router(module.router, dependencies=[Depends(refuse_unknown_parameters)])
        routes += module.router.routes
    rules = access_rules(routes)
    problems.install(app)
    # The middleware added last sees a request first.
    app.add_middleware(JsonBodyLimit, limit=settings.max_body_bytes)
    app.state.inflight = InflightBytes(settings.max_inflight_bytes, settings.tenant_inflight_bytes)
    app.add_middleware(InflightLimit, budget=app.state.inflight)
    app.add_middleware(Backpressure)
    keyring = Keyring(settings.token_file) if settings.token_file else None
    app.add_middleware(AccessControl, rules=rules, keyring=keyring)
    # A service can also be reached at the address that it listens on.
    app.add_middleware(SiteGuard, hosts=None if keyring else {*settings.allowed_hosts, settings.host})
    app.add_middleware(HeadLimit)
    app.openapi = lambda: _describe(app, rules)  # type: ignore[method-assign]
    return app


def _describe(app: FastAPI, rules: list[Rule]) -> dict[str, Any]:
    """FastAPI's OpenAPI document, with additions that it cannot derive: problems, lines of a stream, tokens."""
    if app.openapi_schema is None:
        described = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        schemas = described["components"]["schemas"]
        schemas["Problem"] = Problem.model_json_schema()
        unnamed: dict[str, Any] = {"StreamLine": StreamLine, "IterationReport": IterationReport}
        for name, kind in unnamed.items():
            schema = TypeAdapter(kind).json_schema(ref_template="#/components/schemas/{model}")
            schemas |= {**schema.pop("$defs"), **schemas, name: schema}
        described["components"]["securitySchemes"] = {"bearer": _BEARER}
        for rule in rules:
            need, methods = rule.declaration.need, described["paths"].get(rule.path)
            if methods is not None and need != "open":
                # The list names the roles, which OpenAPI 3.1 allows for a bearer token.
                methods[rule.method.lower()]["security"] = [{"bearer": [] if need == "token" else [need]}]
        app.openapi_schema = described
    return app.openapi_schema
