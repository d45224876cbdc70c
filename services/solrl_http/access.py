"""Access control: the caller of a request, and the access that each route requires.

Only a request's head is checked, before any of the body is read.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from solrl_proto.identifiers import Message
from solrl_proto.problems import Problem, ProblemKind
from starlette.routing import BaseRoute, compile_path
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as Connection

from solrl_http.problems import respond
from solrl_http.tokens import Scope, Token, TokenFileError, TokenStore

LOCAL_TENANT = "local"
"""The tenant of all callers of a service without tokens."""

Need = Literal["open", "token", Scope]
"""The access a route requires: none, any valid token, or a token with this scope."""

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])

_DECLARATION = "solrl_access"
_JSON = "application/json"
_BYTES = "application/octet-stream"
_REALM = 'Bearer realm="solrl"'


@dataclass(frozen=True)
class Declaration:
    """The access that a route requires, and whether its requests wait in the service's queue."""

    need: Need
    queues_work: bool = False


@dataclass(frozen=True)
class Rule:
    """A route, by method and path template, with its declaration.

    `media_types` are allowed for its body; a route without any has no body, and never reads one.
    """

    method: str
    path: str
    declaration: Declaration
    media_types: tuple[str, ...] = ()


@dataclass(frozen=True)
class Caller:
    """The caller of a request. Each tenant has a separate namespace of runs; other tenants' runs do not exist for it.

    No scope includes another: `admin` adds only metrics. It implies no other scope and opens no other tenant's
    namespace.
    """

    tenant: str = LOCAL_TENANT
    token: str | None = None
    """Id of the token in the request; None on a service without tokens."""


def access(need: Need, *, queues_work: bool = False) -> Callable[[Endpoint], Endpoint]:
    """Declare a route's access; goes below the route's own decorator."""

    def declare(endpoint: Endpoint) -> Endpoint:
        setattr(endpoint, _DECLARATION, Declaration(need, queues_work))
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
        declaration = getattr(endpoint, _DECLARATION, None)
        if declaration is None:
            raise RuntimeError(f"route {path} declares no access; add @access(...) below its decorator")
        # Starlette adds HEAD to its own routes; no route here answers it.
        methods = sorted(set(getattr(route, "methods", None) or ()) - {"HEAD"})
        rules += [Rule(method, path, declaration, _media_types(route)) for method in methods]
    return rules


def _media_types(route: BaseRoute) -> tuple[str, ...]:
    """The media types that a route documents for its body."""
    if getattr(route, "body_field", None) is not None:
        return (_JSON,)
    content = (getattr(route, "openapi_extra", None) or {}).get("requestBody", {}).get("content", {})
    return tuple(content) if _JSON in content or not content else (*content, _BYTES)


class Refusal(Message):
    """A problem and the challenge that goes with it."""

    problem: Problem
    challenge: str | None = None


class AccessControl:
    """Middleware that passes on only requests that the rules allow.

    It stores `caller` and `rule` in the request's state. Without a keyring, every caller is the local tenant. A path
    without a rule is answered 404 here and does not reach the router.
    """

    def __init__(self, app: ASGIApp, rules: Sequence[Rule], keyring: TokenStore | None) -> None:
        self._app = app
        self._rules = [(rule, compile_path(rule.path)[0]) for rule in rules]
        self._keyring = keyring

    async def __call__(self, scope: Connection, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        matching = {rule.method: rule for rule, pattern in self._rules if pattern.match(scope["path"])}
        rule = matching.get(scope["method"])
        state = scope.setdefault("state", {})
        state["rule"] = rule
        need = rule.declaration.need if rule else "token"
        judged = self._judge(scope, need)
        if isinstance(judged, Caller):
            if rule is not None and not _has_media_type(scope, rule.media_types):
                await respond(_unsupported(rule.media_types))(scope, receive, send)
                return
            if rule is not None:
                if need != "open":
                    state["caller"] = judged
                await self._app(scope, receive, send)
                return
            judged = _no_route(scope, known_path=bool(matching))
        headers = {"WWW-Authenticate": judged.challenge} if judged.challenge else {}
        if judged.problem.status == 405:
            headers["Allow"] = ", ".join(sorted(matching))
        if judged.problem.status == 503:
            headers["Retry-After"] = "10"
        await respond(judged.problem, headers)(scope, receive, send)

    def _judge(self, scope: Connection, need: Need) -> Caller | Refusal:
        if self._keyring is None or need == "open":
            return Caller()
        sent = [value.decode("latin-1") for name, value in scope["headers"] if name == b"authorization"]
        kind, _, secret = (sent[0] if len(sent) == 1 else "").partition(" ")
        if kind.lower() != "bearer" or not secret.strip():
            return _unauthenticated(
                "the Authorization header is not a bearer token" if sent else "no bearer token was sent"
            )
        try:
            token = self._keyring.find(secret.strip())
        except TokenFileError:
            return _tokens_unreadable()
        if token is None:
            return _unauthenticated("the token is unknown", "invalid_token")
        if token.expired:
            return _unauthenticated(f"the token {token.id} has expired", "invalid_token")
        if need != "token" and need not in token.scopes:
            return _forbidden(token, need)
        return Caller(token.tenant, token.id)


def _has_media_type(scope: Connection, expected: Sequence[str]) -> bool:
    """Whether a body declares one of these types, which other sites' pages cannot send without a CORS preflight."""
    sent = [value.decode("latin-1") for name, value in scope["headers"] if name == b"content-type"]
    return not expected or (len(sent) == 1 and sent[0].partition(";")[0].strip().lower() in expected)


def _unsupported(expected: Sequence[str]) -> Problem:
    return ProblemKind.UNSUPPORTED_MEDIA_TYPE.problem(
        "the Content-Type is missing, or is not one that this route accepts",
        where="header.Content-Type",
        expected=" or ".join(expected),
        action="send the Content-Type header with the body's type",
    )


def _unauthenticated(fault: str, error: str | None = None) -> Refusal:
    problem = ProblemKind.UNAUTHENTICATED.problem(
        fault,
        where="header.Authorization",
        expected="Authorization: Bearer <token>",
        action="ask the operator of this service for a token (`solrl-rollout token create`)",
    )
    return Refusal(problem=problem, challenge=_REALM + (f', error="{error}"' if error else ""))


def _forbidden(token: Token, need: str) -> Refusal:
    problem = ProblemKind.FORBIDDEN.problem(
        f"the token {token.id} lacks the scope {need!r}",
        where="header.Authorization",
        got=list(token.scopes),
        expected=need,
        action=f"use a token created with `--scopes {need}`",
    )
    return Refusal(problem=problem, challenge=f'{_REALM}, error="insufficient_scope", scope="{need}"')


def _tokens_unreadable() -> Refusal:
    problem = ProblemKind.TOKENS_UNREADABLE.problem(
        "the service's token file cannot be used",
        action="ask the operator to repair it; the service's log says what is wrong",
    )
    return Refusal(problem=problem)


def _no_route(scope: Connection, *, known_path: bool) -> Refusal:
    kind = ProblemKind.METHOD_NOT_ALLOWED if known_path else ProblemKind.NOT_FOUND
    detail = f"{scope['method'][:20]} {scope['path'][:200]}: {kind.title}"
    return Refusal(problem=kind.problem(detail, action="/docs lists the routes"))
