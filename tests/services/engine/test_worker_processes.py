"""Workers in processes or as Ray actors: the same bits as one in the service's process, also when they are killed."""

import contextlib
import json
import logging
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from solrl_proto.rollouts import STREAM_MEDIA_TYPE
from solrl_rollout.engine.engine import Engine
from solrl_rollout.engine.workers import make_workers
from solrl_rollout.engine.workers.process import ProcessConnection, memory_file
from solrl_rollout.engine.workers.remote import SharedAdapters
from solrl_rollout.settings import RolloutSettings
from solrl_rollout.status.rollout_metrics import RolloutMetrics
from tests.services.fake_backend import REWARD, FakeBackend
from tests.services.reward_servers import until
from tests.support.service_helpers import Layout, RunningService, adapter_file, rollout_request, running_service
from tests.support.small_model import small_model

SDE = {"kind": "flow", "eta": 0.8, "first": 1}


ON_RAY = pytest.param("ray:2", marks=[pytest.mark.slow, pytest.mark.release])


@pytest.fixture(scope="module")
def one() -> Iterator[RunningService]:
    with running_service(model=small_model()) as running:
        yield running


@pytest.fixture(scope="module", params=["2", ON_RAY])
def two(request: pytest.FixtureRequest) -> Iterator[RunningService]:
    """A service with two worker processes, or two actors on Ray."""
    on_ray = request.param == "ray:2"
    if on_ray:
        request.getfixturevalue("ray_cluster")
    flags, ends_with = ("--workers", request.param, "--device", "cpu"), -signal.SIGKILL if on_ray else 0
    with running_service(*flags, model=small_model(), ends_with=ends_with) as running:
        yield running
        if on_ray:
            running.process.kill()
            assert_gone(workers_of(running))


PROCESSES = pytest.mark.parametrize("two", ["2"], indirect=True)


def workers_of(service: RunningService) -> list[int]:
    """The newest process of each worker."""
    if actors := dict(re.findall(r"worker (ray:\d) is process (\d+) on node", service.log.read_text())):
        return [int(actors[name]) for name in ("ray:0", "ray:1")]
    files = Path(f"/proc/{service.process.pid}/task").glob("*/children")
    return [int(child) for file in files for child in file.read_text().split()]


@contextlib.contextmanager
def engine_of(load_backend: Any, workers: int | str = 2, **settings: Any) -> Iterator[Engine]:
    """An engine that is not started, with workers in processes of their own, on a CPU."""
    own, metrics = RolloutSettings(rewards=(REWARD,), device="cpu", workers=workers, **settings), RolloutMetrics()
    engine = Engine(own, metrics, make_workers(own, metrics, load_backend))
    try:
        yield engine
    finally:
        engine.close()


def assert_gone(pids: list[int]) -> None:
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def groups(service: RunningService, **request: Any) -> Any:
    """The groups of an answer."""
    return service.rollout(**request)["groups"]


def counted(service: RunningService, name: str) -> dict[str, float]:
    """A metric by worker."""
    families = text_string_to_metric_families(service.client.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples]
    return {sample.labels["worker"]: sample.value for sample in samples if sample.name == name}


def wait_until_both_serve(service: RunningService) -> None:
    while (ready := service.client.get("/health/ready").json()) != {"status": "ready", "workers": 2, "serving": 2}:
        # While both are loaded again, it is a problem.
        assert ready.get("workers") == 2 or ready["type"].endswith("engine-stalled")
        time.sleep(0.2)


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
    assert len(after) == 2
    assert all(after[name] > before.get(name, 0) for name in after)


def test_adapters_can_be_changed(one: RunningService, two: RunningService, layout: Layout) -> None:
    for service in (one, two):
        assert service.push("several", 0, adapter_file(layout, 1)).is_success
        assert service.push("several", 1, adapter_file(layout, 2), parent=0).is_success
    base = groups(two, count=48)
    first, second, again = (groups(two, count=48, adapter=("several", version)) for version in (0, 1, 0))
    assert first == again == groups(one, count=48, adapter=("several", 0))
    assert second == groups(one, count=48, adapter=("several", 1))
    assert base == groups(two, count=48) == groups(one, count=48)
    assert len({json.dumps(found) for found in (base, first, second)}) == 3


@PROCESSES
def test_health_is_answered_between_steps_and_a_disconnect_stops_both_workers(two: RunningService) -> None:
    endless = two.send(rollout_request(count=4096, steps=200), accept=STREAM_MEDIA_TYPE)
    endless.socket.sendall(endless.rest)
    assert endless.socket.recv(15)
    assert two.client.get("/health/live").status_code == 200
    assert two.client.get("/health/ready").json()["serving"] == 2
    endless.leave()
    assert len(groups(two, count=48, steps=1)[0]["scores"]) == 48
    assert two.client.get("/v1/status").json()["queue"]["candidates"] == 0


@pytest.mark.slow
def test_a_request_whose_worker_is_killed_finishes_with_the_same_bits(one: RunningService, two: RunningService) -> None:
    """Another process takes its place."""
    asked: Any = {"prompts": ["a red circle", "two blue squares"], "count": 60, "steps": 5}
    restarts = sum(counted(two, "solrl_worker_restarts_total").values())
    chunks, before = counted(two, "solrl_worker_chunks_total"), workers_of(two)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(groups, two, **asked)
        while counted(two, "solrl_worker_chunks_total") == chunks:  # then both are busy
            time.sleep(0.1)
        os.kill(before[0], signal.SIGKILL)
        assert answer.result() == groups(one, **asked)
    wait_until_both_serve(two)
    assert sum(counted(two, "solrl_worker_restarts_total").values()) == restarts + 1
    after = workers_of(two)
    assert (len(after), before[0] in after, before[1] in after) == (2, False, True)
    assert re.search(r"worker (cpu:\d died: signal SIGKILL|ray:0 died: )", two.log.read_text())


@PROCESSES
def test_after_a_signal_both_workers_finish_accepted_work(two: RunningService) -> None:
    """The last test with this service."""
    workers, said = workers_of(two), two.log.read_text()
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


def missing(*_: Any) -> FakeBackend:
    """Is not there."""
    raise OSError("there is no such model")


def lethal(*_: Any) -> FakeBackend:
    """Kills its process."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


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


def noted(*_: Any) -> FakeBackend:
    """Notes in the file BACKENDS_NOTED when it is read and warmed up, which waits until two are read."""
    notes = Path(os.environ["BACKENDS_NOTED"])

    def note(event: str) -> None:
        with notes.open("a") as file:
            file.write(f"{event} ")

    class Noted(FakeBackend):
        def batch_sizes(self, limit: int) -> Sequence[int]:
            deadline = time.monotonic() + 300
            while notes.read_text().split().count("read") < 2:
                assert time.monotonic() < deadline, "the other does not read"
                time.sleep(0.01)
            note("warm")
            return (limit,)

    note("reading")
    time.sleep(0.3)  # the other would begin now
    logging.getLogger(__name__).warning("the weights are read")
    note("read")
    return Noted()


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
