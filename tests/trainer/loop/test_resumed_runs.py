"""Runs that were interrupted, or whose service was killed, and what they must not overwrite."""

import shutil
from pathlib import Path

import pytest
import torch
from solrl_client.rollouts import RolloutClient
from solrl_proto.adapters import AdapterList
from solrl_proto.problems import ProblemError
from solrl_trainer.loop import train
from solrl_trainer.records.trackers.run_trackers import KEY, Trackers
from solrl_trainer.service.adapter_supply import AdapterSupply
from tests.support.service_helpers import running_service
from tests.trainer.real_runs import SMALL, Run, Service, Watcher, go, selected
from tests.trainer.training_helpers import iterations, same, tiny_config


@pytest.fixture(scope="module")
def half(whole: Run, service: Service, folder: Path) -> Run:
    """A run interrupted after its first iteration."""
    return go(service, folder / "parts", "iterations=1")


@pytest.fixture(scope="module")
def bereft(half: Run, service: Service, folder: Path) -> Run:
    """Two iterations, between which the service is killed and restarted empty."""
    return go(service, folder / "bereft", "iterations=2", watcher=Watcher(restarts=service))


@pytest.fixture(scope="module")
def resumed(half: Run, bereft: Run, service: Service) -> Run:
    """The interrupted run, resumed with a service that has lost its adapters."""
    return go(service, half.config.output, "iterations=2", resume=True)


@pytest.mark.slow
def test_a_resumed_run_equals_the_uninterrupted_run_bit_for_bit(whole: Run, half: Run, resumed: Run) -> None:
    assert [record.iteration for record in half.watcher.records] == [0]
    assert [record.iteration for record in resumed.watcher.records] == [1]
    assert same(resumed.state, whole.state)
    assert [resumed.adapter_digest(v) for v in (1, 2)] == [whole.adapter_digest(v) for v in (1, 2)]
    assert selected(resumed) == selected(whole)
    assert all(torch.equal(v, whole.result.after.scores[name]) for name, v in resumed.result.after.scores.items())
    assert all(torch.equal(v, whole.result.before.scores[name]) for name, v in resumed.result.before.scores.items())
    assert iterations(resumed.config.output) == iterations(whole.config.output)
    # Its versions are pushed to an empty store.
    assert [(info.version, info.parent) for info in resumed.held.versions] == [(1, None), (2, 1)]
    assert resumed.held.versions[0].digest == half.held.versions[1].digest

    # Its base is evaluated once.
    once = [(m["event"], m["version"]) for m in resumed.metrics if m["event"] in ("evaluation", "fidelity")]
    assert once == [("evaluation", 0), ("fidelity", 0), ("evaluation", 1), ("evaluation", 2)]
    assert resumed.result.spearman == whole.result.spearman
    for phase in ("explore", "wait", "regenerate", "train"):
        lines = [m["seconds"][phase] for m in resumed.metrics if m["event"] == "iteration"]
        assert resumed.result.seconds[phase] == pytest.approx(sum(lines))
    (until,) = {m["elapsed"]["total"] for m in half.metrics if m["version"] == 1 and m["event"] == "push"}
    assert resumed.result.seconds["total"] > until, "both processes"


def test_an_interrupted_evaluation_is_made_up_for_once(half: Run, service: Service, folder: Path) -> None:
    output, settings = folder / "unjudged", ("iterations=2", "evaluate.every=1")
    with pytest.raises(KeyboardInterrupt):
        go(service, output, *settings, watcher=Watcher(stops_at=(1, "evaluate")))
    resumed = go(service, output, *settings, resume=True)
    (line,) = [m for m in resumed.metrics if m["event"] == "evaluation" and m["version"] == 1]
    (whole,) = [m for m in half.metrics if m["event"] == "evaluation" and m["version"] == 1]
    assert line["rewards"] == whole["rewards"]
    assert line["time"] < next(m["time"] for m in resumed.metrics if m["event"] == "iteration" and m["version"] == 2)

    again = Watcher()
    (output / KEY).write_text("former")
    trackers = Trackers(resumed.config.model_copy(update={"track": ("tensorboard",)}))
    train(resumed.config, again, resume=True, checkpoint=1, trackers=trackers)
    assert (1, "evaluate") not in again.phases
    assert (output / KEY).read_text() != "former"


def test_a_failed_push_loses_no_line_and_is_repeated_by_the_resumed_run(service: Service, folder: Path) -> None:
    output, watcher = folder / "unpushed", Watcher()

    def failing(self: AdapterSupply, version: int, adapter: bytes) -> None:
        raise ConnectionError("gone")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AdapterSupply, "push", failing)
        with pytest.raises(ConnectionError):
            go(service, output, "iterations=1", watcher=watcher)
    resumed = go(service, output, "iterations=1", resume=True)
    events = [(m["event"], m["version"]) for m in resumed.metrics]
    assert events == [("evaluation", 0), ("fidelity", 0), ("iteration", 1), ("push", 1), ("evaluation", 1)]
    assert [info.version for info in resumed.held.versions] == [0, 1]
    assert resumed.held.versions[1].digest == resumed.adapter_digest(1) == resumed.metrics[2]["digest"]


@pytest.mark.release
def test_exploration_moves_to_the_trainer_and_back(service: Service, folder: Path) -> None:
    output = folder / "moving"
    go(service, output, "iterations=1")
    local = go(service, output, "iterations=2", "rollout_url=null", resume=True)
    assert local.held.head == 1
    back = go(service, output, "iterations=3", resume=True)
    assert [m["version"] for m in back.metrics if m["event"] == "iteration"] == [1, 2, 3]
    assert back.held.versions[-1].version == 3


def test_a_service_that_lost_its_adapters_gets_them_again_during_a_run(whole: Run, bereft: Run) -> None:
    assert any("had lost this run's versions 0 and 1" in note for note in bereft.watcher.notes)
    assert not any("lost" in note for note in whole.watcher.notes)
    assert [(info.version, info.parent) for info in bereft.held.versions] == [(0, None), (1, 0), (2, 1)]
    assert same(bereft.state, whole.state)
    assert bereft.held.versions[2].digest == whole.held.versions[2].digest
    assert bereft.shown["curve"]["iterations"] == [1], "the page begins at the restart"


def test_a_finished_run_resumed_pushes_the_same_bytes_trains_none_and_adds_up(resumed: Run, service: Service) -> None:
    state, held, before = resumed.state, resumed.held, resumed.result.seconds
    lines = [line["elapsed"] for line in resumed.metrics]
    assert [line["total"] for line in lines] == sorted(line["total"] for line in lines)
    assert lines[-1]["evaluate"] == pytest.approx(before["evaluate"])
    again = go(service, resumed.config.output, "iterations=2", "evaluate.prompts=1", resume=True)
    assert again.watcher.records == []
    assert same(again.state, state)
    assert again.held == held
    after = again.result.seconds
    assert after["total"] > lines[-1]["total"]
    assert after["evaluate"] > before["evaluate"]
    assert {name: after[name] for name in ("train", "push")} == {name: before[name] for name in ("train", "push")}


def test_another_run_is_not_overwritten(whole: Run, resumed: Run, bereft: Run, service: Service, folder: Path) -> None:
    """Version 1 of run "parts" is stored; another run with that name would start at version 0."""
    held = resumed.held
    with pytest.raises(ProblemError) as raised:
        train(resumed.config.model_copy(update={"output": folder / "other", "seed": 1}), Watcher())
    assert (raised.value.problem.status, raised.value.problem.kind) == (409, "run-taken")
    assert raised.value.problem.action
    with RolloutClient(resumed.config.rollout_url) as client:
        answer = client._http.get(f"/v1/runs/{resumed.config.run}/adapters")
    assert AdapterList.model_validate_json(answer.content) == held
    # Version 0 is the same in every run of one seed: resuming in an empty folder does not delete the other.
    with pytest.raises(ProblemError) as raised:
        train(bereft.config.model_copy(update={"output": folder / "empty"}), Watcher(), resume=True)
    assert raised.value.problem.kind == "run-taken"
    assert service.adapters("bereft") == bereft.held


def test_a_resumed_run_rewinds_later_versions(service: Service, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = go(service, output := folder / "beyond", "iterations=2", "explore.prompts=1")
    shutil.rmtree(output / "checkpoints" / "000002")
    monkeypatch.delattr(RolloutClient, "rewind")
    with pytest.raises(AttributeError, match="rewind"):
        go(service, output, "iterations=2", "explore.prompts=1", resume=True)
    monkeypatch.undo()
    again = go(service, output, "iterations=2", "explore.prompts=1", resume=True)
    assert again.adapter_digest(2) == first.held.versions[2].digest
    assert [info.version for info in again.held.versions] == [0, 1, 2]
    assert service.running.client.get("/v1/runs/beyond/iterations").json()["curve"]["iterations"] == [0, 1]


def test_a_run_that_pushed_and_stopped_before_its_first_checkpoint_is_resumed(service: Service, folder: Path) -> None:
    output, settings = folder / "early", ("iterations=2", "checkpoint_every=2", "explore.prompts=1")
    pushed = Watcher(stops_at=(1, "explore"), may_stop=lambda: service.adapters("early").head == 1)
    with pytest.raises(KeyboardInterrupt):
        go(service, output, *settings, watcher=pushed)
    assert not (output / "checkpoints").exists()
    resumed = go(service, output, *settings, resume=True)
    assert [info.version for info in resumed.held.versions] == [0, 1, 2]


def test_a_run_whose_checkpoint_the_service_no_longer_retains_is_resumed(folder: Path) -> None:
    with running_service("--retain", "1") as forgetful:
        settings = ("iterations=3", "explore.prompts=1", "evaluate.fidelity_prompts=0", "keep_checkpoints=3")
        config = tiny_config(*SMALL, *settings, output=folder / "forgotten", run="forgotten", rollout_url=forgetful.url)
        train(config, Watcher())
        for version in (2, 3):
            shutil.rmtree(config.output / "checkpoints" / f"{version:06d}")
        train(config, Watcher(), resume=True)
        assert forgetful.client.get("/v1/runs/forgotten/adapters").json()["head"] == 3
