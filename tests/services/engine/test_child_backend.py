"""The backend protocol: a service with its backend in another process answers like one with a local backend."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import child_backend
import pytest
from service_helpers import Layout, RunningService, adapter_file, problem, rollout_request, running_service
from solrl_core.adapter import encode_adapter, lora_a_key, lora_b_key
from solrl_proto.rollouts import STREAM_MEDIA_TYPE
from support.adapters import random_adapter

SDE = {"kind": "flow", "eta": 0.8, "first": 1}
PROGRAM = (sys.executable, child_backend.__file__)


@pytest.fixture(scope="module")
def child() -> Iterator[RunningService]:
    with running_service(program=PROGRAM) as running:
        yield running
        assert "Traceback" not in running.log.read_text()


def children(pid: int) -> list[str]:
    """Processes started by any thread of a process."""
    files = Path(f"/proc/{pid}/task").glob("*/children")
    return [child for file in files for child in file.read_text().split()]


def groups(service: RunningService, plan: dict[str, Any] | None = None, **request: Any) -> Any:
    body = rollout_request(**request)
    body["plan"] |= plan or {}
    response = service.client.post("/v1/rollouts", json=body)
    assert response.status_code == 200, response.text
    return response.json()["groups"]


def test_the_model_has_the_same_identity(child: RunningService, service: RunningService) -> None:
    theirs, ours = (one.client.get("/v1/models").json() for one in (child, service))
    assert theirs == ours


@pytest.mark.parametrize("precision", ["nvfp4", "bf16"])
def test_scores_and_images_have_the_same_bits(child: RunningService, service: RunningService, precision: str) -> None:
    asked: Any = {"prompts": ["a red circle", "two blue squares"], "count": 30, "precision": precision, "images": "png"}
    assert groups(child, **asked) == groups(service, **asked)


@pytest.mark.parametrize("by", [{"solver": "euler"}, {"solver": "dpm2"}, {"sde": SDE}], ids=["euler", "dpm2", "sde"])
def test_pruned_groups_have_the_same_bits(child: RunningService, service: RunningService, by: dict[str, Any]) -> None:
    plan = {"prune": {"after": 2, "keep": 26}, "guidance": 2.0} | by
    theirs, ours = (groups(one, plan, count=40, steps=4) for one in (child, service))
    assert theirs == ours
    assert sum(theirs[0]["pruned"]) == 14


def test_adapters_can_be_changed(child: RunningService, service: RunningService, layout: Layout) -> None:
    for one in (child, service):
        assert one.push("child", 0, adapter_file(layout, 1)).status_code == 201
        assert one.push("child", 1, adapter_file(layout, 2), parent=0).status_code == 201
    base = groups(child)
    first, second, again = (groups(child, adapter=("child", version)) for version in (0, 1, 0))
    assert first == again == groups(service, adapter=("child", 0))
    assert second == groups(service, adapter=("child", 1))
    assert base == groups(child) == groups(service)
    assert len({json.dumps(one) for one in (base, first, second)}) == 3


def test_a_failed_merge_keeps_the_previous_adapter(child: RunningService, layout: Layout) -> None:
    huge = random_adapter(layout, 1)
    module = next(iter(layout))
    for key in (lora_a_key(module), lora_b_key(module)):
        huge.tensors[key].fill_(3e38)
    assert child.push("huge", 0, encode_adapter(huge)).status_code == 201
    before = groups(child)
    refused = child.client.post("/v1/rollouts", json=rollout_request(adapter=("huge", 0)))
    assert (refused.status_code, problem(refused)["kind"]) == (422, "adapter-merge")
    assert groups(child) == before


def test_pings_are_answered_between_steps_and_a_disconnect_stops_the_child(child: RunningService) -> None:
    endless = child.send(rollout_request(count=4096, steps=200), accept=STREAM_MEDIA_TYPE)
    endless.socket.sendall(endless.rest)
    assert endless.socket.recv(15)
    assert child.client.get("/health/live").status_code == 200
    endless.leave()
    assert len(groups(child, count=2, steps=1)[0]["scores"]) == 2
    assert child.client.get("/v1/status").json()["queue"]["candidates"] == 0


def test_the_service_exits_if_its_child_is_killed() -> None:
    with running_service(program=PROGRAM, ends_with=1) as service:
        pid = service.process.pid
        (worker,) = children(pid)
        os.kill(int(worker), signal.SIGKILL)
        response = service.client.post("/v1/rollouts", json=rollout_request())
        assert (response.status_code, problem(response)["kind"]) == (500, "generation-failed")
        assert service.process.wait(600) == 1
        assert "the engine thread died" in service.log.read_text()
