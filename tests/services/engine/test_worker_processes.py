"""Workers in processes of their own: the same bits as one in the service's process, also when they are killed."""

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from solrl_proto.rollouts import STREAM_MEDIA_TYPE
from solrl_rollout.engine.engine import Engine
from solrl_rollout.engine.workers import make_workers
from solrl_rollout.engine.workers.process import ProcessConnection, memory_file
from solrl_rollout.engine.workers.remote import SharedAdapters
from solrl_rollout.settings import RolloutSettings
from solrl_rollout.status.rollout_metrics import RolloutMetrics
from tests.services.fake_backend import REWARD
from tests.services.unfit_backends import lethal, missing, noted, paced, sleepy, stopped
from tests.services.worker_helpers import (
    assert_adapters_can_be_changed,
    assert_cancelled_within_a_step,
    assert_finished_with_the_same_bits,
    assert_gone,
    assert_replaced_once_stopped,
    counted,
    engine_of,
    groups,
    one_thread,
    wait_until_both_serve,
)
from tests.support.service_helpers import Layout, RunningService, rollout_request, running_service
from tests.support.small_model import small_model

SDE = {"kind": "flow", "eta": 0.8, "first": 1}


@pytest.fixture(scope="module")
def one() -> Iterator[RunningService]:
    with one_thread(), running_service(model=small_model()) as running:
        yield running


@pytest.fixture(scope="module")
def two() -> Iterator[RunningService]:
    with one_thread(), running_service("--workers", "2", model=small_model()) as running:
        yield running


def children(service: RunningService) -> list[int]:
    """The service's worker processes."""
    files = Path(f"/proc/{service.process.pid}/task").glob("*/children")
    return [int(child) for file in files for child in file.read_text().split()]


def test_both_workers_together_host_the_same_model(one: RunningService, two: RunningService) -> None:
    ours, theirs = (service.client.get("/v1/models").json() for service in (one, two))
    assert theirs == ours
    wait_until_both_serve(two)


GUIDED = {"guidance": 2.0, "steps": 4, "precision": "nvfp4"}


@pytest.mark.parametrize(
    "plan",
    [{"precision": "nvfp4"}, {"precision": "bf16"}, GUIDED | {"solver": "dpm2"}, GUIDED | {"sde": SDE}],
    ids=["nvfp4", "bf16", "dpm2", "sde"],
)
def test_scores_and_images_have_the_same_bits(one: RunningService, two: RunningService, plan: dict[str, Any]) -> None:
    asked: Any = {"prompts": ["a red circle", "two blue squares"], "count": 30, "images": "png"}
    before = counted(two, "solrl_worker_chunks_total")
    theirs = groups(two, **asked, **plan)
    assert theirs == groups(one, **asked, **plan)
    after = counted(two, "solrl_worker_chunks_total")
    assert all(after[name] > before.get(name, 0) for name in ("cpu:0", "cpu:1"))


def test_adapters_can_be_changed(one: RunningService, two: RunningService, layout: Layout) -> None:
    assert_adapters_can_be_changed(one, two, layout)


def test_health_is_answered_between_steps_and_a_disconnect_stops_both_workers(two: RunningService) -> None:
    endless = two.send(rollout_request(count=4096, steps=200), accept=STREAM_MEDIA_TYPE)
    endless.socket.sendall(endless.rest)
    assert endless.socket.recv(15)
    assert two.client.get("/health/live").status_code == 200
    assert two.client.get("/health/ready").json()["serving"] == 2
    endless.leave()
    assert len(groups(two, count=48, steps=1)[0]["scores"]) == 48
    assert two.client.get("/v1/status").json()["queue"]["candidates"] == 0


@pytest.mark.release
def test_a_cancelled_chunk_takes_no_step_after_its_worker_has_answered(tmp_path: Path) -> None:
    with engine_of(paced) as engine:
        assert_cancelled_within_a_step(engine, tmp_path / "steps")


@pytest.mark.release
def test_a_stopped_worker_is_replaced_and_its_chunk_is_made_again(tmp_path: Path) -> None:
    with engine_of(stopped, live_timeout=5.0) as engine:
        assert_replaced_once_stopped(engine, tmp_path / "stopped")


@pytest.mark.slow
def test_a_request_whose_worker_is_killed_finishes_with_the_same_bits(one: RunningService, two: RunningService) -> None:
    assert_finished_with_the_same_bits(one, two, children)
    assert re.search(r"worker cpu:\d died: signal SIGKILL", two.log.read_text())


def test_after_a_signal_both_workers_finish_accepted_work(two: RunningService) -> None:
    """The last test with this service."""
    workers, said = children(two), two.log.read_text()
    accepted = two.send(rollout_request(count=240, steps=2))
    assert two.client.get("/health/live").status_code == 200  # by now, the request has been read
    for process in (two.process.pid, *workers):  # as Ctrl-C reaches all of them
        os.kill(process, signal.SIGTERM)
    status, _, body = accepted.response()
    assert status == 200
    assert len(json.loads(body)["groups"][0]["scores"]) == 240
    assert two.process.wait(600) == 0
    assert_gone(workers)
    assert " died" not in two.log.read_text().removeprefix(said)


@pytest.mark.slow
def test_a_worker_ends_with_its_front() -> None:
    connection = ProcessConnection({}, SharedAdapters(memory_file))
    connection._messages.close()
    assert connection.process.wait(600) == 0


@pytest.mark.release
def test_workers_end_when_the_service_is_killed() -> None:
    with one_thread(), running_service("--workers", "2", ends_with=-signal.SIGKILL) as service:
        workers = children(service)
        service.send(rollout_request(count=480, steps=100)).socket.close()
        service.process.kill()
        assert_gone(workers)


@pytest.mark.release
@pytest.mark.parametrize(
    ("load_backend", "error", "said"),
    [
        (missing, OSError, "there is no such model"),
        (lethal, RuntimeError, r"worker cpu:\d ended while it loaded: signal SIGKILL"),
    ],
)
def test_workers_that_cannot_serve_together_do_not_start(load_backend: Any, error: type[Exception], said: str) -> None:
    with engine_of(load_backend) as engine, pytest.raises(error, match=said):
        engine.start().result(600)
    assert engine.scheduler.dead


@pytest.mark.release
def test_an_engine_that_closes_does_not_wait_for_its_workers_to_load() -> None:
    settings, metrics = RolloutSettings(rewards=(REWARD,), device="cpu", workers=2), RolloutMetrics()
    workers: Any = make_workers(settings, metrics, sleepy)
    engine = Engine(settings, metrics, workers)
    loading = engine.start()
    while not all(one._running for one in workers):
        time.sleep(0.01)
    engine.close()
    assert engine.scheduler.dead
    assert all(one._connection.process.returncode is not None for one in workers)
    with pytest.raises(RuntimeError, match=r"worker cpu:\d ended while it loaded"):
        loading.result(0)


@pytest.mark.release
def test_workers_read_weights_one_after_another_but_warm_up_together(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    notes = tmp_path / "notes"
    monkeypatch.setenv("BACKENDS_NOTED", str(notes))
    with engine_of(noted, log_format="json") as engine:
        engine.start().result(600)
    events = notes.read_text().split()
    assert [event for event in events if event != "warm"] == ["reading", "read"] * 2
    assert events.count("warm") == 2
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if "the weights are read" in line]
    assert sorted(line["worker"] for line in lines) == ["cpu:0", "cpu:1"]
