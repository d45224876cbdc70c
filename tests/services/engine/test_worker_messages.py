"""Messages between the front and its workers: nothing changes on the way, and adapters are not copied."""

import gc
import json
import os
import socket
import threading
import weakref
from typing import Any

import pytest
import torch
from solrl_core.adapter import encode_adapter
from solrl_core.errors import RewardUnavailableError
from solrl_proto.problems import ProblemError
from solrl_proto.rollouts import RewardTime
from solrl_rollout.engine.errors import EngineDeadError, chunk_error
from solrl_rollout.engine.work import ExternalReward, ScoredChunk
from solrl_rollout.engine.workers import make_workers
from solrl_rollout.engine.workers.child import Child, map_adapter
from solrl_rollout.engine.workers.encoding import (
    decode_chunk,
    decode_error,
    decode_scored,
    encode_chunk,
    encode_error,
    encode_scored,
)
from solrl_rollout.engine.workers.process import Messages, ProcessConnection, memory_file
from solrl_rollout.engine.workers.remote import SharedAdapters, importable
from solrl_rollout.settings import RolloutSettings
from solrl_rollout.status.rollout_metrics import RolloutMetrics
from tests.services.fake_backend import REWARD, FakeBackend, chunk, job, leased
from tests.support.adapters import random_adapter

LAYOUT = {"linear": (4, 6), "other": (8, 4)}


def test_a_chunk_arrives_as_it_was_sent() -> None:
    adapter = leased(LAYOUT, 1)
    of = job("r", "t", steps=4, precision="nvfp4", adapter=adapter, images=True)
    of.external_rewards = {
        REWARD: ExternalReward("http://a:1", "sha256:two"),
        "other": ExternalReward("http://b:2", None),
    }
    of.plan = of.plan.model_copy(update={"solver": "dpm2", "guidance": 2.5})
    sent = chunk(of, "a “red” circle")
    header = encode_chunk(sent)
    arrived = decode_chunk(json.loads(json.dumps(header)))
    assert (header["adapter"], arrived.job.adapter) == (adapter.digest, None)  # which is found by its digest
    for field in ("tenant", "run", "model", "precision", "plan", "rewards", "images", "external_rewards"):
        assert getattr(arrived.job, field) == getattr(of, field), field
    assert (arrived.prompt, list(arrived.seeds)) == (sent.prompt, list(sent.seeds))


@pytest.mark.parametrize("shared", [False, True])
def test_a_result_arrives_with_compressed_images(shared: bool) -> None:
    values = torch.randn(8)
    rewards = {"a": values[:4], "b": values[:4] if shared else values[4:]}
    images = torch.randint(256, (4, 8, 8, 3), dtype=torch.uint8)
    times = {"a": RewardTime(seconds=0.125), "b": RewardTime(seconds=0.125, server="there:80")}
    sent = ScoredChunk(rewards, images, 0.0, True, 0.5, 2.0, 0.25, 0.125, times)
    arrived = decode_scored(*encode_scored(sent))
    assert all(torch.equal(arrived.rewards[name], rewards[name]) for name in rewards)
    assert arrived.images is not None
    assert [bytes(image)[:4] for image in arrived.images] == [b"\x89PNG"] * 4
    for field in ("switched", "switch", "generate", "reward", "server_seconds", "times"):
        assert getattr(arrived, field) == getattr(sent, field)


@pytest.mark.parametrize(
    "sent", [EngineDeadError(), chunk_error(chunk(job()), RewardUnavailableError("clipscore", "is gone"))]
)
def test_an_error_keeps_its_problem(sent: ProblemError) -> None:
    arrived = decode_error(**json.loads(json.dumps(encode_error(sent))))
    assert vars(arrived) == vars(sent)


def test_messages_of_any_size_arrive_in_order_also_after_the_end_of_the_connection() -> None:
    ours, theirs = (Messages(end) for end in socket.socketpair())
    bodies = [b"", os.urandom(3_000_000), b"x"]
    sending = threading.Thread(target=lambda: [ours.send({"n": i}, body) for i, body in enumerate(bodies)])
    sending.start()
    assert [theirs.receive() for _ in bodies] == [({"n": i}, body) for i, body in enumerate(bodies)]
    sending.join()
    theirs.send({"n": 3})
    ours.end()
    assert ours.receive() == ({"n": 3}, b"")
    for end in (ours, theirs):
        with pytest.raises(ConnectionError):
            end.receive()


def test_an_adapter_in_shared_memory_is_mapped_once_and_freed_with_its_last_reference() -> None:
    connection = ProcessConnection({}, SharedAdapters(memory_file))
    child, adapter = Child(print, map_adapter), leased(LAYOUT, 1)
    path = connection.publish(adapter)
    assert connection.publish(adapter) == path
    found = child.find_adapter("one", path)
    assert child.find_adapter("one", path) is found
    assert encode_adapter(found) == adapter.file
    found.tensors[next(iter(found.tensors))].zero_()  # a mapping of its own
    assert encode_adapter(map_adapter(path)) == adapter.file
    with open(path, "r+b", buffering=0) as file, pytest.raises(PermissionError):
        file.write(b"x")
    del adapter
    gc.collect()
    with pytest.raises(FileNotFoundError):
        map_adapter(path)
    connection.kill()
    connection.close()


def test_a_worker_forgets_the_adapter_that_it_used_longest_ago() -> None:
    """A merge checks each adapter object only once, so runs that alternate must find the same ones."""
    child = Child(print, lambda seed: random_adapter(LAYOUT, seed))
    kept, forgotten = (weakref.ref(child.find_adapter(str(seed), seed)) for seed in range(2))
    for seed in (0, 2, 3, 4):
        child.find_adapter(str(seed), seed)
    gc.collect()
    assert kept() is child.find_adapter("0", 0)
    assert forgotten() is None


@pytest.mark.parametrize("loader", [lambda *_: FakeBackend(), FakeBackend().load])
def test_a_loader_that_other_processes_cannot_import_is_refused(loader: Any) -> None:
    with pytest.raises(ValueError, match="which other processes can import"):
        importable(loader)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"gpus": "0,0"}, "got gpus '0,0'; expected all, or different numbers"),
        ({"gpus": "first"}, "got gpus 'first'; expected all"),
        ({"gpus": "all", "workers": 2}, "expected one of them"),
        ({"gpus": "1", "device": "cuda:0"}, "expected gpus, or one device"),
        ({"gpus": "all", "workers": "ray"}, "expected one of them"),
        ({"workers": "ray", "device": "cuda:1"}, "expected auto, cpu or cuda: Ray assigns the GPUs"),
        ({"workers": "ray:0"}, "got workers 'ray:0'; expected a number of processes, ray, or ray:N"),
        ({"workers": 0}, "got workers 0; expected a number of processes"),
    ],
)
def test_contradictory_devices_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RolloutSettings(**settings)


@pytest.mark.parametrize(
    ("gpus", "visible", "expected"),
    [
        ("all", "", [("cuda:0", "0"), ("cuda:1", "1"), ("cuda:2", "2")]),
        ("2,0", "", [("cuda:2", "2"), ("cuda:0", "0")]),
        ("0,2", "5, GPU-a,7", [("cuda:0", "5"), ("cuda:2", "7")]),
    ],
)
def test_each_gpu_is_the_only_one_of_its_process_and_others_are_refused(
    monkeypatch: pytest.MonkeyPatch, gpus: str, visible: str, expected: list[tuple[str, str]]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    workers: Any = make_workers(RolloutSettings(gpus=gpus), RolloutMetrics(), FakeBackend)
    assert [(one.name, one._connect.args[0]["CUDA_VISIBLE_DEVICES"]) for one in workers] == expected
    assert {one._settings.device for one in workers} == {"cuda"}
    refused: tuple[tuple[int, dict[str, Any], str], ...] = (
        (2, {"gpus": "0,2"}, "PyTorch finds 2 GPUs; expected numbers below 2"),
        (0, {"gpus": "all"}, "PyTorch finds no GPU"),
        (2, {"device": "cuda", "workers": 2}, "expected --gpus all"),
    )
    for count, settings, said in refused:
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        with pytest.raises(ValueError, match=said):
            make_workers(RolloutSettings(**settings), RolloutMetrics(), FakeBackend)


def test_workers_share_threads_unless_the_environment_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    for given, expected in ((None, "4"), ("7", "7")):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if given is not None:
            monkeypatch.setenv("OMP_NUM_THREADS", given)
        workers: Any = make_workers(RolloutSettings(device="cpu", workers=3), RolloutMetrics(), FakeBackend)
        assert [one._connect.args[0]["OMP_NUM_THREADS"] for one in workers] == [expected] * 3
        assert [one.name for one in workers] == ["cpu:0", "cpu:1", "cpu:2"]


@pytest.mark.parametrize(
    ("given", "workers", "number"), [("2", 2, 2), ("ray", "ray", None), ("ray:12", "ray:12", 12), (None, 1, 1)]
)
def test_workers_are_a_number_of_processes_or_of_actors(
    monkeypatch: pytest.MonkeyPatch, given: str | None, workers: int | str, number: int | None
) -> None:
    if given is not None:
        monkeypatch.setenv("SOLRL_WORKERS", given)
    settings = RolloutSettings()
    assert (settings.workers, settings.worker_number, settings.on_ray) == (workers, number, isinstance(workers, str))
