"""Services with several workers: their answers, metrics and state."""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from solrl_proto.problems import ProblemError
from solrl_rollout.engine.engine import Engine
from solrl_rollout.engine.workers import make_workers
from solrl_rollout.settings import RolloutSettings
from solrl_rollout.status.rollout_metrics import RolloutMetrics
from tests.services.fake_backend import REWARD, chunk, job, pinged
from tests.support.service_helpers import Layout, RunningService, adapter_file


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Every process has one thread, on which scores depend."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


def groups(service: RunningService, **request: Any) -> Any:
    """The groups of an answer."""
    return service.rollout(**request)["groups"]


def counted(service: RunningService, name: str) -> dict[str, float]:
    """A metric by worker."""
    families = text_string_to_metric_families(service.client.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples]
    return {sample.labels["worker"]: sample.value for sample in samples if sample.name == name}


@contextlib.contextmanager
def engine_of(load_backend: Any, workers: int | str = 2, **settings: Any) -> Iterator[Engine]:
    """An engine that is not started, with workers in processes of their own, on a CPU."""
    own, metrics = RolloutSettings(rewards=(REWARD,), device="cpu", workers=workers, **settings), RolloutMetrics()
    engine = Engine(own, metrics, make_workers(own, metrics, load_backend))
    try:
        yield engine
    finally:
        engine.close()


def wait_until_both_serve(service: RunningService) -> None:
    while (ready := service.client.get("/health/ready").json()) != {
        "status": "ready",
        "workers": 2,
        "serving": 2,
    }:
        # While both are loaded again, it is a problem.
        assert ready.get("workers") == 2 or ready["type"].endswith("engine-stalled")
        time.sleep(0.2)


def assert_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 600
    while (left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def assert_adapters_can_be_changed(one: RunningService, two: RunningService, layout: Layout) -> None:
    """Two workers have the scores of one, with each version and without."""
    for service in (one, two):
        assert service.push("several", 0, adapter_file(layout, 1)).status_code == 201
        assert service.push("several", 1, adapter_file(layout, 2), parent=0).status_code == 201
    base = groups(two, count=48)
    first, second, again = (groups(two, count=48, adapter=("several", version)) for version in (0, 1, 0))
    assert first == again == groups(one, count=48, adapter=("several", 0))
    assert second == groups(one, count=48, adapter=("several", 1))
    assert base == groups(two, count=48) == groups(one, count=48)
    assert len({json.dumps(found) for found in (base, first, second)}) == 3


def assert_finished_with_the_same_bits(
    one: RunningService, two: RunningService, processes: Callable[[RunningService], list[int]]
) -> None:
    """A request finishes although the first of two workers is killed; another process takes its place."""
    asked: Any = {"prompts": ["a red circle", "two blue squares"], "count": 60, "steps": 5}
    restarts = sum(counted(two, "solrl_worker_restarts_total").values())
    chunks, before = counted(two, "solrl_worker_chunks_total"), processes(two)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(groups, two, **asked)
        while counted(two, "solrl_worker_chunks_total") == chunks:  # then both are busy
            time.sleep(0.1)
        os.kill(before[0], signal.SIGKILL)
        assert answer.result() == groups(one, **asked)
    wait_until_both_serve(two)
    assert sum(counted(two, "solrl_worker_restarts_total").values()) == restarts + 1
    after = processes(two)
    assert len(after) == 2
    assert (before[0] in after, before[1] in after) == (False, True)


def assert_cancelled_within_a_step(engine: Engine, steps: Path) -> None:
    """Start an engine on `paced`, which notes its steps in a file, and cancel a chunk."""
    steps.touch()
    engine.start().result(600)
    endless = chunk(job(steps=200), str(steps))
    engine.scheduler.submit([endless])
    while not steps.stat().st_size:
        time.sleep(0.01)
    engine.cancel(endless.job)
    pinged(engine)  # sent after it, and answered between two steps
    taken = steps.stat().st_size
    with pytest.raises(ProblemError):
        endless.result.result(600)
    assert steps.stat().st_size == taken < 200


def assert_replaced_once_stopped(engine: Engine, note: Path) -> None:
    """Start an engine on `stopped`, whose worker stops at the first step of a chunk and notes its process in a file."""
    engine.start().result(600)
    held = chunk(job(), str(note))
    engine.scheduler.submit([held])
    assert len(held.result.result(600).rewards[REWARD]) == 4
    assert_gone([int(note.read_text())])
    assert held.losses == 1
    pinged(engine)
