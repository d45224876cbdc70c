"""Every route of the published contract refuses callers without access."""

import json
import re
from pathlib import Path

import httpx
import pytest
from fastapi import APIRouter
from solrl_http.access import access, access_rules
from solrl_proto.adapters import ADAPTER_MEDIA_TYPE
from solrl_rollout.__main__ import main
from solrl_rollout.http.app import create_app
from solrl_rollout.openapi import document
from solrl_rollout.settings import RolloutSettings
from tests.services.security_helpers import SCOPES, Guarded, push, raw
from tests.support.service_helpers import MODEL, Layout, adapter_file, problem, rollout_request
from tests.support.typed import refused

PUBLISHED = (Path(__file__).parents[3] / "proto" / "openapi.json").read_text()
CONTRACT = json.loads(PUBLISHED)
OPERATIONS = [(method.upper(), path) for path, methods in CONTRACT["paths"].items() for method in methods]
OPEN = [("GET", "/health/live"), ("GET", "/health/ready")]
GUARDED = [operation for operation in OPERATIONS if operation not in OPEN]
TOLD = {"iteration": 0, "version": 1, "explored_version": 0, "score": {"mean": 0, "best": 1, "worst": -1}}
TOLD |= {"proxy_mean": 0, "loss": 0}
"""The report of an iteration, as a trainer sends it."""
BODIES = {("POST", "/v1/runs/{run}/iterations"): TOLD}
"""Bodies of operations on a run that need one as JSON."""
RUN_OPERATIONS = [operation for operation in GUARDED if "{run}" in operation[1]]
PUSH = ("PUT", "/v1/runs/{run}/adapters/{version}")
NEEDED = {("DELETE", "/v1/runs/{run}/adapters"): "?after=0&head=0"}
"""Queries of operations that need one, except `PUSH`."""


def needed(operation: tuple[str, str]) -> str:
    """The access that an operation requires in the published contract: "open", "token" or a scope."""
    method, path = operation
    security = CONTRACT["paths"][path][method.lower()].get("security")
    if security is None:
        return "open"
    ((roles,),) = [list(one.values()) for one in security]
    return str(*roles) or "token"


def filled(path: str, run: str = "secret", version: int = 0) -> str:
    return path.replace("{run}", run).replace("{version}", str(version))


def ask(
    guarded: Guarded, method: str, path: str, token: str | None, query: str = f"?model={MODEL}", run: str = "secret"
) -> tuple[int, dict[str, str], bytes]:
    """The answer to a head that announces a large body, none of which is sent."""
    media_type = ADAPTER_MEDIA_TYPE if method == "PUT" else "application/json"
    head = f"{method} {filled(path, run)}{query} HTTP/1.1\nHost: localhost\nContent-Type: {media_type}"
    head += "\nContent-Length: 500000000"
    if token is not None:
        head += f"\nAuthorization: Bearer {guarded.tokens.get(token, token)}"
    return raw(guarded.service.port, head)


def test_the_published_contract_is_current_and_that_of_a_running_service(guarded: Guarded) -> None:
    assert document() == PUBLISHED, "python -m solrl_rollout.openapi > proto/openapi.json"
    assert guarded.service.client.get("/openapi.json").json() == CONTRACT


def test_the_contract_states_the_access_of_every_operation() -> None:
    assert [operation for operation in OPERATIONS if needed(operation) == "open"] == OPEN
    for method, path in GUARDED:
        scope = {"/metrics": "admin", "/v1/rollouts": "rollout"}.get(path, "token" if method == "GET" else "push")
        assert needed((method, path)) == scope, (method, path)
    assert CONTRACT["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"
    assert len(GUARDED) >= 6


def test_the_service_does_not_start_with_a_route_without_declared_access() -> None:
    router = APIRouter()

    @router.get("/v1/known/{name}")
    @access("push")
    async def known(name: str) -> str:
        return name

    (rule,) = access_rules(router.routes)
    assert (rule.method, rule.path, rule.need) == ("GET", "/v1/known/{name}", "push")

    @router.get("/v1/surprise")
    async def surprise() -> str:
        return "open"

    with pytest.raises(RuntimeError, match="/v1/surprise declares no access"):
        access_rules(router.routes)


@pytest.mark.anyio
async def test_a_route_without_a_rule_is_404_also_in_nested_routers() -> None:
    app = create_app(RolloutSettings())
    inner, outer = APIRouter(), APIRouter(prefix="/outer")

    @app.get("/v1/surprise")
    @inner.get("/v1/surprise")
    async def surprise() -> str:
        return "open"

    outer.include_router(inner)
    app.include_router(outer)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        for path in ("/v1/surprise", "/outer/v1/surprise"):
            assert (await client.get(path)).status_code == 404


@pytest.mark.parametrize(("method", "path"), GUARDED)
@pytest.mark.parametrize("token", [None, "expired", "solrl_guessed", "", "x y"], ids=str)
def test_strangers_get_401_before_they_send_a_body(guarded: Guarded, method: str, path: str, token: str | None) -> None:
    status, headers, body = ask(guarded, method, path, token)
    document = json.loads(body)
    assert (status, document["type"]) == (401, "urn:solrl:problem:unauthenticated")
    assert headers["www-authenticate"].startswith("Bearer")
    assert headers["content-type"] == "application/problem+json"
    assert ("expired" in document["detail"]) == (token == "expired")


@pytest.mark.parametrize(("method", "path"), [one for one in GUARDED if needed(one) in SCOPES])
def test_the_wrong_scope_gets_403_before_it_sends_a_body(guarded: Guarded, method: str, path: str) -> None:
    need = needed((method, path))
    for scope in set(SCOPES) - {need}:
        status, headers, body = ask(guarded, method, path, scope)
        assert (status, json.loads(body)["type"]) == (403, "urn:solrl:problem:forbidden")
        assert f'scope="{need}"' in headers["www-authenticate"]


@pytest.mark.parametrize(("method", "path"), RUN_OPERATIONS)
def test_others_runs_are_404_before_and_after_a_body(guarded: Guarded, layout: Layout, method: str, path: str) -> None:
    assert push(guarded, "push", "secret", adapter_file(layout, 1)).status_code in (200, 201)
    if (method, path) == PUSH:  # it creates a separate run with the same name
        assert push(guarded, "b", "secret", adapter_file(layout, 2)).status_code in (200, 201)
        mine = guarded.service.client.get(filled(path), headers=guarded.headers("a")).json()
        theirs = guarded.service.client.get(filled(path), headers=guarded.headers("b")).json()
        assert mine["digest"] != theirs["digest"]
        return
    push(guarded, "push", "private", adapter_file(layout, 1))
    query = NEEDED.get((method, path), "")
    name = filled(path, run="private") + query
    body = BODIES.get((method, path))
    assert guarded.service.client.request(method, name, headers=guarded.headers("a"), json=body).is_success
    push(guarded, "push", "private", adapter_file(layout, 1))
    theirs_answer = guarded.service.client.request(method, name, headers=guarded.headers("b"), json=body)
    missing = filled(path, run="nobody") + query
    nobody = guarded.service.client.request(method, missing, headers=guarded.headers("b"), json=body)
    assert (theirs_answer.status_code, problem(theirs_answer)["kind"]) == (404, "run-not-found")
    assert theirs_answer.text.replace("private", "nobody") == nobody.text
    status, _, answer = ask(guarded, method, path, "b", query, run="private")
    assert (status, json.loads(answer)["type"]) == (404, "urn:solrl:problem:run-not-found")


def test_another_tenants_adapter_cannot_be_explored_with(guarded: Guarded, layout: Layout) -> None:
    push(guarded, "push", "private", adapter_file(layout, 1))
    asked = rollout_request(count=2, steps=1, adapter=("private", 0))
    mine = guarded.service.client.post("/v1/rollouts", json=asked, headers=guarded.headers("rollout"))
    theirs = guarded.service.client.post("/v1/rollouts", json=asked, headers=guarded.headers("b"))
    assert mine.status_code == 200
    assert (theirs.status_code, problem(theirs)["kind"]) == (404, "run-not-found")


@pytest.mark.parametrize(("method", "path"), [one for one in OPERATIONS if one not in GUARDED])
def test_health_and_documentation_are_open(guarded: Guarded, method: str, path: str) -> None:
    assert guarded.service.client.request(method, path).status_code == 200
    for page in ("/", "/docs", "/docs/static/swagger-ui.css", "/openapi.json"):
        assert guarded.service.client.get(page).status_code == 200


def test_unknown_paths_tell_strangers_nothing(guarded: Guarded) -> None:
    client = guarded.service.client
    assert client.get("/v9").status_code == client.delete("/v1/models").status_code == 401
    assert client.get("/v9", headers=guarded.headers("rollout")).status_code == 404
    refused = client.delete("/v1/models", headers=guarded.headers("rollout"))
    assert (refused.status_code, refused.headers["allow"]) == (405, "GET")


@pytest.mark.parametrize(
    "value", ["Basic YTpi", "Bearer", "bearer  ", "Token x", "Bearer é", "Bearer {a}\nAuthorization: Bearer {a}"]
)
def test_other_credentials_are_refused_and_so_are_two_tokens(guarded: Guarded, value: str) -> None:
    head = f"GET /v1/models HTTP/1.1\nHost: localhost\nAuthorization: {value.format(**guarded.tokens)}"
    status, headers, _ = raw(guarded.service.port, head)
    assert (status, headers["www-authenticate"][:6]) == (401, "Bearer")


def test_no_secret_is_in_the_log_or_the_file(guarded: Guarded) -> None:
    guarded.service.client.get("/v1/models", headers=guarded.headers("a"))
    for text in (guarded.service.log.read_text(), guarded.file.read_text()):
        assert not [name for name, secret in guarded.tokens.items() if secret in text]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "gpu-node"])
def test_a_public_address_is_not_served_without_tokens(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("solrl_http.serving.bind", pytest.fail)
    assert re.search(r"--token-file .*--allow-anonymous", refused(main, "serve", "--host", host, "--port", "0"))


def test_every_answer_forbids_guessing_its_type_and_an_open_one_names_no_model(guarded: Guarded) -> None:
    client = guarded.service.client
    answers = [client.get(path) for path in ("/", "/docs", "/health/ready", "/v1/models", "/nowhere")]
    assert [answer.headers.get_list("x-content-type-options") for answer in answers] == [["nosniff"]] * len(answers)
    assert answers[2].json() == {"status": "ready", "workers": 1, "serving": 1}
