"""Who asks, and who may ask for what. Judged from a request's head alone, before any of its body is read."""

from dataclasses import dataclass
from typing import Literal

from solrl_proto.identifiers import Message
from solrl_proto.problems import Problem, ProblemKind
from starlette.routing import compile_path
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as Connection

from solrl_rollout.http.problems import respond
from solrl_rollout.http.tokens import Keyring, Scope, Token, TokenFileError

LOCAL_TENANT = "local"
"""Whose runs they are where access is not controlled."""

Need = Literal["open", "token", Scope]
"""What a route asks for: nothing, any valid token, or one with this scope."""

RULES: dict[str, Need] = {
    "GET /": "open",  # the page without what it shows
    "GET /docs": "open",
    "GET /docs/oauth2-redirect": "open",
    "GET /redoc": "open",
    "GET /openapi.json": "open",
    "GET /health/live": "open",
    "GET /health/ready": "open",
    "GET /metrics": "admin",  # of all tenants, so not for one of them
    "GET /v1/models": "token",
    "GET /v1/status": "token",
    "POST /v1/rollouts": "rollout",
    "GET /v1/runs": "token",
    "DELETE /v1/runs/{run}": "push",
    "GET /v1/runs/{run}/iterations": "token",
    "POST /v1/runs/{run}/iterations": "push",
    "GET /v1/runs/{run}/adapters": "token",
    "DELETE /v1/runs/{run}/adapters": "push",
    "GET /v1/runs/{run}/adapters/{version}": "token",
    "GET /v1/runs/{run}/adapters/{version}/weights": "token",
    "PUT /v1/runs/{run}/adapters/{version}": "push",
    "PUT /v1/runs/{run}/adapters/{version}/pin": "push",
    "DELETE /v1/runs/{run}/adapters/{version}/pin": "push",
}
"""Every route there is. What is not listed is answered 404 before it reaches the router."""

_COMPILED = [(rule.split()[0], rule, compile_path(rule.split()[1])[0]) for rule in RULES]
_REALM = 'Bearer realm="solrl"'


@dataclass(frozen=True)
class Caller:
    """Who sent a request. Every tenant's runs are a namespace of their own: others' names are simply not there.

    Scopes stand for themselves: `admin` sees metrics, and gives neither other scopes nor other tenants' names.
    """

    tenant: str = LOCAL_TENANT
    token: str | None = None
    """Id of the token that was shown; None where access is not controlled."""


def check_declared(method: str, path: str) -> None:
    """Raises RuntimeError for a route that `RULES` does not list."""
    if f"{method} {path}" not in RULES:
        raise RuntimeError(f"route {method} {path} declares nothing; list it in solrl_rollout.http.access.RULES")


class Refusal(Message):
    """A problem and the challenge that goes with it."""

    problem: Problem
    challenge: str | None = None


class AccessControl:
    """Middleware that lets nothing pass which `RULES` does not allow.

    It leaves `caller` and `rule` in the request's state. Without a keyring everyone is the local tenant.
    """

    def __init__(self, app: ASGIApp, keyring: Keyring | None) -> None:
        self._app = app
        self._keyring = keyring

    async def __call__(self, scope: Connection, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer why not."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        rule, allowed = _rule(scope["method"], scope["path"])
        state = scope.setdefault("state", {})
        state["rule"] = rule
        judged = self._judge(scope, RULES[rule] if rule else "token")
        if isinstance(judged, Caller):
            if rule and RULES[rule] != "open":
                state["caller"] = judged
            if rule:
                await self._app(scope, receive, send)
                return
            judged = _nothing_there(scope, allowed)
        headers = {"WWW-Authenticate": judged.challenge} if judged.challenge else {}
        if judged.problem.status == 405:
            headers["Allow"] = ", ".join(allowed)
        if judged.problem.status == 503:
            headers["Retry-After"] = "10"
        await respond(judged.problem, headers)(scope, receive, send)

    def _judge(self, scope: Connection, need: Need) -> Caller | Refusal:
        if self._keyring is None or need == "open":
            return Caller()
        shown = [value.decode("latin-1") for name, value in scope["headers"] if name == b"authorization"]
        kind, _, secret = (shown[0] if len(shown) == 1 else "").partition(" ")
        if kind.lower() != "bearer" or not secret.strip():
            return _unknown("no bearer token was sent" if not shown else "the Authorization header is no bearer token")
        try:
            token = self._keyring.find(secret.strip())
        except TokenFileError:
            return _closed()
        if token is None:
            return _unknown("the token is not known here", "invalid_token")
        if token.expired:
            return _unknown(f"the token {token.id} has expired", "invalid_token")
        if need != "token" and need not in token.scopes:
            return _forbidden(token, need)
        return Caller(token.tenant, token.id)


def _rule(method: str, path: str) -> tuple[str | None, list[str]]:
    """The rule of a request, if there is one, and the methods that its path takes."""
    matching = {verb: rule for verb, rule, pattern in _COMPILED if pattern.match(path)}
    return matching.get(method), sorted(matching)


def _unknown(fault: str, error: str | None = None) -> Refusal:
    problem = ProblemKind.UNAUTHENTICATED.problem(
        fault,
        where="header.Authorization",
        expected="Authorization: Bearer <token>",
        action="ask whoever runs this service for a token (`solrl-rollout token create`)",
    )
    return Refusal(problem=problem, challenge=_REALM + (f', error="{error}"' if error else ""))


def _forbidden(token: Token, need: str) -> Refusal:
    problem = ProblemKind.FORBIDDEN.problem(
        f"the token {token.id} has not the scope {need!r}",
        where="header.Authorization",
        got=list(token.scopes),
        expected=need,
        action=f"use a token that was made with `--scopes {need}`",
    )
    return Refusal(problem=problem, challenge=f'{_REALM}, error="insufficient_scope", scope="{need}"')


def _closed() -> Refusal:
    problem = ProblemKind.TOKENS_UNREADABLE.problem(
        "the service's token file cannot be used",
        action="whoever runs the service must mend it; the service's log says what is wrong",
    )
    return Refusal(problem=problem)


def _nothing_there(scope: Connection, allowed: list[str]) -> Refusal:
    kind = ProblemKind.METHOD_NOT_ALLOWED if allowed else ProblemKind.NOT_FOUND
    detail = f"{scope['method'][:20]} {scope['path'][:200]}: {kind.title}"
    return Refusal(problem=kind.problem(detail, action="/docs lists the routes"))
