"""Access control: the caller of a request, and the access that each route requires.

Only a request's head is checked, before any of the body is read.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

from solrl_proto.problems import ProblemError, ProblemKind
from starlette.routing import BaseRoute, compile_path
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as Connection

from solrl_http.limits.origins import require_own_site
from solrl_http.problem_responses import Refusal, respond_to
from solrl_http.tokens import Scope, Token, TokenFileError, TokenStore

LOCAL_TENANT = "local"
"""The tenant of all callers of a service without tokens."""

Need = Literal["open", "token", Scope]
"""The access a route requires: none, any valid token, or a token with this scope."""

MAX_HEAD_BYTES = 32 * 1024
"""Limit of a request's first line and headers together."""

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])

_DECLARATION = "solrl_access"
_JSON = "application/json"
_BYTES = "application/octet-stream"
_REALM = 'Bearer realm="solrl"'


@dataclass(frozen=True)
class Rule:
    """A route, by method and path template, with what it requires.

    Attributes:
        media_types: allowed for its body; a route without any has no body, and never reads one.
        need: the access.
        queues_work: whether its requests wait in the service's queue.
        body_limit_setting: name of the setting that limits its body.
    """

    method: str
    path: str
    media_types: tuple[str, ...]
    need: Need
    queues_work: bool
    body_limit_setting: str


@dataclass(frozen=True)
class Caller:
    """The caller of a request. Each tenant has a separate namespace of runs; other tenants' runs do not exist for it.

    No scope includes another: `admin` adds only metrics. It implies no other scope and opens no other tenant's
    namespace.
    """

    tenant: str = LOCAL_TENANT
    token: str | None = None
    """Id of the token in the request; None on a service without tokens."""
    scopes: tuple[str, ...] | None = None
    """Scopes of the token; None on a service without tokens."""


def access(
    need: Need, *, queues_work: bool = False, body_limit_setting: str = "max_body_bytes"
) -> Callable[[Endpoint], Endpoint]:
    """Declare what a route requires, see `Rule`; goes below the route's own decorator."""

    def declare(endpoint: Endpoint) -> Endpoint:
        declared = partial(Rule, need=need, queues_work=queues_work, body_limit_setting=body_limit_setting)
        setattr(endpoint, _DECLARATION, declared)
        return endpoint

    return declare


def access_rules(routes: Iterable[BaseRoute]) -> list[Rule]:
    """The rules that an application's routes declare.

    Raises:
        RuntimeError: a route declares no access.
    """
    rules = []
    for route in routes:
        path, endpoint = getattr(route, "path", str(route)), getattr(route, "endpoint", None)
        declared = getattr(endpoint, _DECLARATION, None)
        if declared is None:
            raise RuntimeError(f"route {path} declares no access; add @access(...) below its decorator")
        # Starlette adds HEAD to its own routes; no route here answers it.
        methods = sorted(set(getattr(route, "methods", None) or ()) - {"HEAD"})
        rules += [declared(method, path, _media_types(route)) for method in methods]
    return rules


def _media_types(route: BaseRoute) -> tuple[str, ...]:
    """The media types that a route documents for its body."""
    if getattr(route, "body_field", None) is not None:
        return (_JSON,)
    content = (getattr(route, "openapi_extra", None) or {}).get("requestBody", {}).get("content", {})
    return tuple(content) if _JSON in content or not content else (*content, _BYTES)


class AccessControl:
    """Middleware that passes on only requests whose heads the rules allow, before any of the body is read.

    It stores `caller` and `rule` in the request's state. Without a token file, every caller is the local tenant. A path
    without a rule is answered 404 here and does not reach the router. While a tenant can queue no more, its work is
    refused here, too, so that a refusal costs little.
    """

    def __init__(
        self, app: ASGIApp, rules: Sequence[Rule], tokens: TokenStore | None, hosts: Collection[str] | None
    ) -> None:
        """`hosts`: see `require_own_site`."""
        self._app = app
        self._rules = [(rule, compile_path(rule.path)[0]) for rule in rules]
        self._tokens = tokens
        self._hosts = hosts

    async def __call__(self, scope: Connection, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope)
        except (Refusal, ProblemError) as error:
            await respond_to(error)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _check(self, scope: Connection) -> None:
        require_small_head(scope)
        require_own_site(scope, self._hosts)
        matching = {rule.method: rule for rule, pattern in self._rules if pattern.match(scope["path"])}
        rule = scope["state"]["rule"] = matching.get(scope["method"])
        caller = self._caller(scope, rule.need if rule else "token")
        if rule is None:
            raise _no_route(scope, matching)
        _require_media_type(scope, rule.media_types)
        if rule.need != "open":
            scope["state"]["caller"] = caller
        if rule.queues_work:
            scope["app"].state.service.require_capacity(caller.tenant)

    def _caller(self, scope: Connection, need: Need) -> Caller:
        if self._tokens is None or need == "open":
            return Caller()
        sent = [value.decode("latin-1") for name, value in scope["headers"] if name == b"authorization"]
        kind, _, secret = (sent[0] if len(sent) == 1 else "").partition(" ")
        if kind.lower() != "bearer" or not secret.strip():
            raise _unauthenticated(
                "the Authorization header is not a bearer token" if sent else "no bearer token was sent"
            )
        try:
            token = self._tokens.find(secret.strip())
        except TokenFileError:
            raise Refusal(
                ProblemKind.TOKENS_UNREADABLE,
                "the service's token file cannot be used",
                headers={"Retry-After": "10"},
                action="ask the operator to repair it; the service's log has the fault",
            ) from None
        if token is None:
            raise _unauthenticated("the token is unknown", ', error="invalid_token"')
        if token.expired:
            raise _unauthenticated(f"the token {token.id} has expired", ', error="invalid_token"')
        if need != "token" and need not in token.scopes:
            raise _forbidden(token, need)
        return Caller(token.tenant, token.id, token.scopes)


def require_small_head(scope: Connection) -> None:
    """Refuse a head of more than `MAX_HEAD_BYTES`, or with two lengths of one body.

    A proxy may see the end of such a body elsewhere, which allows request smuggling.

    Raises:
        Refusal: 431 `head-too-large`, or 400.
    """
    size = len(scope.get("raw_path") or b"") + len(scope["query_string"])
    size += sum(len(name) + len(value) + 4 for name, value in scope["headers"])
    if size > MAX_HEAD_BYTES:
        raise Refusal(
            ProblemKind.HEAD_TOO_LARGE,
            "the path and the headers have more bytes than the service accepts",
            where="header",
            got=f"{size} bytes",
            expected=f"at most {MAX_HEAD_BYTES} bytes",
            action="send fewer or shorter headers",
        )
    if {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope["headers"]}:
        raise Refusal(
            ProblemKind.BAD_REQUEST,
            "the request has both Content-Length and Transfer-Encoding",
            headers={"Connection": "close"},
            where="header.Content-Length",
            expected="one of them",
            action="send one of them",
        )


def _require_media_type(scope: Connection, expected: Sequence[str]) -> None:
    """Refuse a body without one of these types, which other sites' pages cannot send without a CORS preflight."""
    sent = [value.decode("latin-1") for name, value in scope["headers"] if name == b"content-type"]
    if expected and (len(sent) != 1 or sent[0].partition(";")[0].strip().lower() not in expected):
        raise Refusal(
            ProblemKind.UNSUPPORTED_MEDIA_TYPE,
            "the Content-Type is missing, or is not one that this route accepts",
            where="header.Content-Type",
            expected=" or ".join(expected),
            action="send the Content-Type header with the body's type",
        )


def _unauthenticated(fault: str, error: str = "") -> Refusal:
    return Refusal(
        ProblemKind.UNAUTHENTICATED,
        fault,
        headers={"WWW-Authenticate": _REALM + error},
        where="header.Authorization",
        expected="Authorization: Bearer <token>",
        action="ask the operator of this service for a token (`solrl-rollout token create`)",
    )


def _forbidden(token: Token, need: str) -> Refusal:
    return Refusal(
        ProblemKind.FORBIDDEN,
        f"the token {token.id} lacks the scope {need!r}",
        headers={"WWW-Authenticate": f'{_REALM}, error="insufficient_scope", scope="{need}"'},
        where="header.Authorization",
        got=list(token.scopes),
        expected=need,
        action=f"use a token created with `--scopes {need}`",
    )


def _no_route(scope: Connection, methods: Iterable[str]) -> Refusal:
    allowed = ", ".join(sorted(methods))
    kind = ProblemKind.METHOD_NOT_ALLOWED if allowed else ProblemKind.NOT_FOUND
    detail = f"{scope['method'][:20]} {scope['path'][:200]}: {kind.title}"
    return Refusal(kind, detail, headers={"Allow": allowed} if allowed else None, action="/docs lists the routes")
