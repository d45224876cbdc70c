"""Places for workers in a Ray cluster of two nodes, and its faults; test_worker_processes.py has what they compute."""

import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, ObjectStoreFullError
from solrl_rollout.doctor import check
from solrl_rollout.engine.workers import make_workers
from solrl_rollout.engine.workers.ray_cluster import RayCluster, RayConnection
from solrl_rollout.engine.workers.remote import SharedAdapters
from solrl_rollout.settings import RolloutSettings
from solrl_rollout.status.rollout_metrics import RolloutMetrics
from tests.services.fake_backend import REWARD, FakeBackend, leased

pytestmark = [pytest.mark.slow, pytest.mark.release, pytest.mark.usefixtures("ray_cluster")]


@pytest.mark.parametrize(
    ("workers", "device", "said"),
    [
        ("ray:5", "cpu", "the 2 nodes of the Ray cluster have place for 4 workers, with 1 CPUs each; expected"),
        ("ray:1", "cuda", "have place for 0 workers, with a GPU each"),
        ("ray", "auto", "got --workers ray, and the 2 nodes of the Ray cluster have no GPU; expected ray:N for N"),
    ],
)
def test_more_workers_than_the_cluster_has_places_are_refused(workers: str, device: str, said: str) -> None:
    with pytest.raises(RuntimeError, match=said):
        make_workers(RolloutSettings(rewards=(REWARD,), device=device, workers=workers), RolloutMetrics(), FakeBackend)


def test_the_doctor_says_how_many_actors_start() -> None:
    finding = next(one for one in check(RolloutSettings(workers="ray:3", device="cpu")) if one.subject == "workers")
    assert (finding.state, finding.text) == ("ok", "3 Ray actors, on cpu, in a cluster of 2 nodes")


def test_no_worker_waits_for_a_place_once_its_service_has_left_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = RayCluster(RolloutSettings(workers="ray:1", device="cpu"))
    assert cluster.joined
    monkeypatch.setattr(ray, "nodes", lambda: [])
    monkeypatch.setattr(ray, "get", MagicMock(side_effect=GetTimeoutError))
    connection = RayConnection(cluster, "ray:0")
    with pytest.raises(ConnectionError):
        connection.receive()
    assert connection.close() == "this machine is no node of the Ray cluster any more"


def test_errors_of_ray_are_those_of_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "put", MagicMock(side_effect=ObjectStoreFullError("the object store is full")))
    monkeypatch.setattr(ray, "kill", lambda _: None)
    handle, actor = SimpleNamespace(remote=MagicMock(side_effect=ActorDiedError)), MagicMock()
    actor.handle.options.return_value = handle
    cluster: Any = SimpleNamespace(adapters=SharedAdapters(ray.put), start=lambda _: actor)
    connection = RayConnection(cluster, "ray:0")
    with pytest.raises(OSError, match="the object store is full") as refused:
        connection.publish(leased({"linear": (4, 6)}, 1))
    assert not isinstance(refused.value, ConnectionError)
    with pytest.raises(ConnectionError):
        connection.send({"do": "ping", "id": 0})
    assert "actor died" in connection.close()


def test_without_a_cluster_the_error_says_how_to_start_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ray.shutdown()
    monkeypatch.setattr(ray, "init", MagicMock(side_effect=ConnectionError("no node answers")))
    with pytest.raises(RuntimeError, match=r"no Ray cluster to join: no node answers; expected .*`ray start --head`"):
        make_workers(RolloutSettings(rewards=(REWARD,), workers="ray:1"), RolloutMetrics(), FakeBackend)


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "solrl_rollout.engine.workers.ray_cluster")
    with pytest.raises(RuntimeError, match=r"needs the package ray: pip install '\.\[ray\]'"):
        make_workers(RolloutSettings(rewards=(REWARD,), workers="ray"), RolloutMetrics(), FakeBackend)
