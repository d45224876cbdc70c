"""The application around a service's routes: access, limits, log, problem documents and contract, alike for all."""

from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib.metadata import version
from types import ModuleType
from typing import Any

from fastapi import Depends, FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter
from solrl_proto.problems import Problem
from starlette.routing import Route
from starlette.types import ASGIApp

from solrl_http import problem_responses
from solrl_http.access import AccessControl, Rule, access, access_rules
from solrl_http.limits.bodies import Bodies, InflightBytes
from solrl_http.request_log import RequestLog
from solrl_http.request_metrics import RequestMetrics
from solrl_http.routes import docs, metrics
from solrl_http.routes.common import refuse_unknown_parameters
from solrl_http.serving import ServiceState
from solrl_http.settings import HttpSettings
from solrl_http.tokens import TokenStore

_BEARER = {
    "type": "http",
    "scheme": "bearer",
    "description": "A token from `solrl-rollout token create`. Not needed on a service without a token file, "
    "which only serves its own machine.",
}


class _Application(FastAPI):
    """FastAPI with the request log outside its error handling, so that a 500 is logged with its id, too."""

    def build_middleware_stack(self) -> ASGIApp:
        return RequestLog(super().build_middleware_stack(), self.state.metrics)


def make_app(
    title: str,
    description: str,
    routes: Iterable[ModuleType],
    settings: HttpSettings,
    service_metrics: RequestMetrics,
    running: Callable[[], AbstractAsyncContextManager[ServiceState]],
    *,
    documented: Mapping[str, Any] | None = None,
) -> FastAPI:
    """A service's application, behind everything that all services share.

    Args:
        title, description: title and description of the published contract.
        routes: modules with a `router`; all endpoints declare their access. `/docs` and `/metrics` are added.
        settings: address, access and limits.
        service_metrics: become `app.state.metrics`.
        running: the service, which becomes `app.state.service` and can `require_capacity`, while the application runs;
            raises errors that prevent it from starting.
        documented: types of the contract that no route's signature names, by schema name.

    Raises:
        TokenFileError: the settings name a token file that cannot be used.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with running() as service:
            app.state.service = service
            yield
            service.draining = True

    app = _Application(
        title=title,
        version=version("solrl"),
        description=description,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.state.metrics = service_metrics
    endpoints = list(app.routes)  # FastAPI's own: the contract
    for route in endpoints:
        assert isinstance(route, Route)
        access("open")(route.endpoint)
    for module in (docs, *routes, metrics):
        app.include_router(module.router, dependencies=[Depends(refuse_unknown_parameters)])
        endpoints += module.router.routes
    rules = access_rules(endpoints)
    problem_responses.install(app)
    _add_middleware(app, rules, settings)
    app.openapi = lambda: _describe(app, rules, documented or {})  # type: ignore[method-assign]
    return app


def _add_middleware(app: FastAPI, rules: list[Rule], settings: HttpSettings) -> None:
    # The middleware added last sees a request first.
    app.state.inflight = InflightBytes(settings.max_inflight_bytes, settings.tenant_inflight_bytes)
    app.add_middleware(Bodies, settings=settings, budget=app.state.inflight)
    tokens = TokenStore(settings.token_file) if settings.token_file else None
    # A service can also be reached at the address that it listens on.
    if tokens:
        app.state.metrics.watch_tokens(tokens.tokens)
    hosts = None if tokens else {host.lower() for host in (*settings.allowed_hosts, settings.host)}
    app.add_middleware(AccessControl, rules=rules, tokens=tokens, hosts=hosts)


def _describe(app: FastAPI, rules: list[Rule], documented: Mapping[str, Any]) -> dict[str, Any]:
    """FastAPI's OpenAPI document, with additions that it cannot derive: problems, `documented` types, tokens."""
    if app.openapi_schema is None:
        described = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        schemas = described["components"]["schemas"]
        schemas["Problem"] = Problem.model_json_schema()
        for name, kind in documented.items():
            schema = TypeAdapter(kind).json_schema(ref_template="#/components/schemas/{model}")
            schemas |= {**schema.pop("$defs"), **schemas, name: schema}
        described["components"]["securitySchemes"] = {"bearer": _BEARER}
        for rule in rules:
            need, methods = rule.need, described["paths"].get(rule.path)
            if methods is not None and need != "open":
                # The list names the roles, which OpenAPI 3.1 allows for a bearer token.
                methods[rule.method.lower()]["security"] = [{"bearer": [] if need == "token" else [need]}]
        app.openapi_schema = described
    return app.openapi_schema
