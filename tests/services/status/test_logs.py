"""The log of a request, which clients cannot forge."""

import json
import logging
import os
import re
from pathlib import Path
from typing import Any

import pytest
from solrl_http import logs
from tests.services.reward_servers import until
from tests.services.security_helpers import Guarded, raw
from tests.support.service_helpers import RunningService, rollout_request, running_service


def lines(service: RunningService, request_id: str) -> list[dict[str, Any]]:
    """All lines of a request. A line follows its answer, so this waits for the line of a later request."""
    fence = service.client.get("/v9").headers["x-request-id"]
    until(lambda: fence in service.log.read_text())
    parsed = [json.loads(line) for line in service.log.read_text().splitlines() if line.startswith("{")]
    return [line for line in parsed if line.get("request_id") == request_id]


def test_a_request_is_one_line_with_all_fields(guarded: Guarded) -> None:
    headers = guarded.headers("rollout") | {"X-Request-ID": "mine-1"}
    answer = guarded.service.client.get("/v1/runs/nobody/adapters/3", headers=headers)
    assert (answer.status_code, answer.headers["x-request-id"]) == (404, "mine-1")
    (line,) = lines(guarded.service, "mine-1")
    assert line["level"] == "info"
    assert (line["tenant"], line["run"], line["method"], line["status"]) == ("a", "nobody", "GET", 404)
    assert line["route"] == "/v1/runs/{run}/adapters/{version}"
    assert line["problem"] == "run-not-found"
    assert line["seconds"] >= 0
    assert line["client"] == "127.0.0.1"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", line["time"])


def test_a_rollouts_line_names_its_model_and_successful_probes_have_none(guarded: Guarded) -> None:
    assert guarded.service.client.get("/health/live", headers={"X-Request-ID": "probe"}).status_code == 200
    headers = guarded.headers("rollout") | {"X-Request-ID": "mine-2"}
    answer = guarded.service.client.post("/v1/rollouts", json=rollout_request(count=1, steps=1), headers=headers)
    assert answer.status_code == 200
    (line,) = lines(guarded.service, "mine-2")
    assert (line["model"], line["route"], line["status"]) == ("mini-sana", "/v1/rollouts", 200)
    assert lines(guarded.service, "probe") == []


@pytest.mark.parametrize("given", ["", "a b", "x" * 65, "é"])
def test_a_malformed_id_is_replaced(guarded: Guarded, given: str) -> None:
    head = f"GET /v1/models HTTP/1.1\nHost: localhost\nX-Request-ID: {given}"
    status, headers, _ = raw(guarded.service.port, head)
    assert status == 401
    assert re.fullmatch(r"[0-9a-f]{16}", headers["x-request-id"])
    (line,) = lines(guarded.service, headers["x-request-id"])
    assert (line["status"], line["problem"]) == (401, "unauthenticated")


def test_a_name_in_a_path_forges_no_line(guarded: Guarded) -> None:
    path = "/v1/runs/%0a%7B%22request_id%22:%22forged%22%7D%0a/adapters"
    answer = guarded.service.client.get(path, headers=guarded.headers("a"))
    assert answer.status_code == 422
    assert lines(guarded.service, "forged") == []
    (line,) = lines(guarded.service, answer.headers["x-request-id"])
    assert "run" not in line


def test_text_lines_are_readable(tmp_path: Path) -> None:
    with running_service("--log-format", "text") as service:
        os.link(service.log, tmp_path / "log")  # remains after the service has ended and written all lines
        answer = service.client.get("/v1/runs/nobody%0aX/adapters", headers={"X-Request-ID": "abc"})
        assert answer.status_code == 422
        service.client.get("/v1/runs/nobody/adapters")
    text = (tmp_path / "log").read_text()
    assert re.search(r'^\d\d:\d\d:\d\d info +GET /v1/runs/nobody\\nX/adapters .*request_id="abc"', text, re.MULTILINE)
    assert re.search(r'GET /v1/runs/nobody/adapters .*run="nobody"', text)
    assert "HTTP/1.1" not in text  # uvicorn's own lines
    assert re.search(rf"page +│ {service.url}/ ", text)


def record(message: str, *arguments: object, **more: Any) -> logging.LogRecord:
    built = logging.LogRecord("a", logging.INFO, "", 1, message, arguments, more.pop("exc_info", None))
    built.__dict__.update(more)
    return built


def test_fields_are_on_every_line_of_their_request() -> None:
    logs.add_fields(run="lost")  # outside a request
    assert "run" not in json.loads(logs.JsonFormatter().format(record("before")))
    logs.begin_request("r1")
    logs.add_fields(run="demo", model=None)
    line = json.loads(logs.JsonFormatter().format(record("a %s", "b", fields={"status": 200})))
    assert (line["message"], line["run"], line["request_id"], line["status"]) == ("a b", "demo", "r1", 200)
    assert "model" not in line


def test_neither_a_message_nor_an_exception_forges_a_line_or_controls_a_terminal() -> None:
    try:
        raise ValueError("\x1b[2J\n12:00:00 info    forged")
    except ValueError as error:
        logged = record("a\nb\r\x1b[31m %s", "\n", exc_info=(ValueError, error, error.__traceback__))
    assert "forged" in json.loads(logs.JsonFormatter().format(logged))["exception"]
    lines = logs.TextFormatter().format(logged).split("\n")
    assert lines[-1].endswith("forged")
    assert all(line.startswith("  ") for line in lines[1:])
    assert all(map(str.isprintable, lines))
