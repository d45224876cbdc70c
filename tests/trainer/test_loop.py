"""Whole runs with real services: uninterrupted, resumed, with a service that is killed, and refused."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from service_helpers import RunningService, running_service
from solrl_core.adapter import adapter_digest
from solrl_core.errors import MismatchError
from solrl_minis import catalog
from solrl_proto.adapters import AdapterList
from solrl_proto.problems import ProblemError
from solrl_proto.rollouts import AdapterRef, Candidates, Plan, RewardSpec, RolloutAnswer, RolloutRequest
from solrl_trainer.client import RolloutClient
from solrl_trainer.config import RunConfig
from solrl_trainer.loop import Result, train
from solrl_trainer.metrics import read_metrics
from solrl_trainer.prompts import prompts_of_iteration, read_prompts
from solrl_trainer.records import IterationRecord
from solrl_trainer.rollouts.adapter_supply import AdapterSupply
from solrl_trainer.rollouts.exploration import seed_root
from solrl_trainer.rollouts.groups import GroupSelection
from solrl_trainer.rollouts.iteration import IterationSamples
from solrl_trainer.rollouts.png import from_png
from solrl_trainer.rollouts.source import rollout_source
from solrl_trainer.run import run
from solrl_trainer.selection import best_worst
from support.ports import free_port
from training_helpers import tiny_config

PROGRAM = str(Path(sys.executable).parent / "solrl-train")
SMALL = (
    *("explore.prompts=2", "explore.candidates=24", "explore.keep=8", "explore.steps=2", "explore.precision=nvfp4"),
    *("evaluate.prompts=8", "evaluate.seeds=1", "evaluate.steps=2", "evaluate.fidelity_prompts=1"),
    *("optimizer.updates=1", "optimizer.batch=16", "algorithm.timestep_fraction=0.5"),
)


class Service:
    """A service on one port, which can be killed and restarted without its adapters."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._stack = ExitStack()
        self.start()

    def start(self) -> None:
        self.running: RunningService = self._stack.enter_context(running_service(port=self.port))

    def stop(self) -> None:
        self._stack.close()

    def die(self) -> None:
        """Kill it: after a signal to stop, it would first finish accepted requests, and nothing would be lost."""
        self.running.process.kill()
        with suppress(AssertionError):  # about its exit code
            self._stack.close()

    def adapters(self, run: str) -> AdapterList:
        return AdapterList.model_validate(self.running.client.get(f"/v1/runs/{run}/adapters").json())


@dataclass
class Watcher:
    """A reporter that records, and restarts the given service, if any, after one iteration."""

    restarts: Service | None = None
    phases: list[tuple[int, str]] = field(default_factory=list)
    records: list[IterationRecord] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def phase(self, iteration: int, name: str) -> None:
        self.phases.append((iteration, name))

    def finished(self, record: IterationRecord) -> None:
        self.records.append(record)
        if self.restarts is not None:
            self.restarts.die()
            self.restarts.start()
            self.restarts = None

    def note(self, text: str) -> None:
        self.notes.append(text)


@dataclass
class Run:
    """A finished training, and the versions that the service stored at its end."""

    config: RunConfig
    result: Result
    watcher: Watcher
    held: AdapterList

    @property
    def state(self) -> dict[str, torch.Tensor]:
        return load_file(self.config.output / "checkpoints" / "000002" / "state.safetensors")

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return read_metrics(self.config.output / "metrics.jsonl")

    def adapter_digest(self, version: int) -> str:
        return adapter_digest(
            (self.config.output / "checkpoints" / f"{version:06d}" / "adapter.safetensors").read_bytes()
        )


def go(service: Service, output: Path, *overrides: str, watcher: Watcher | None = None, resume: bool = False) -> Run:
    watcher = watcher or Watcher()
    config = tiny_config(*SMALL, *overrides, output=output, run=output.name, rollout_url=service.url)
    result = train(config, watcher, resume=resume)
    return Run(config, result, watcher, service.adapters(config.run))


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    found = Service()
    yield found
    found.stop()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def unreachable(folder: Path) -> subprocess.Popen[str]:
    """A run without a service, started early because it waits between its attempts."""
    command = [PROGRAM, "run", "--rollout-url", f"http://127.0.0.1:{free_port()}", "--output", str(folder / "alone")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def taken(folder: Path) -> subprocess.Popen[str]:
    """A run whose folder has another run's checkpoints, also started early."""
    (folder / "taken" / "checkpoints" / "000001").mkdir(parents=True)
    (folder / "taken" / "config.json").write_text("{}")
    command = [PROGRAM, "run", "--output", str(folder / "taken")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def whole(unreachable: subprocess.Popen[str], taken: subprocess.Popen[str], service: Service, folder: Path) -> Run:
    """Two uninterrupted iterations, in a folder where a run stopped before its first checkpoint."""
    output = folder / "whole"
    output.mkdir()
    (output / "metrics.jsonl").write_text('{"event": "iteration", "iteration": 0, "version": 1, "loss": 99}\n')
    return go(service, output, "iterations=2")


@pytest.fixture(scope="module")
def half(whole: Run, service: Service, folder: Path) -> Run:
    """A run interrupted after its first iteration."""
    return go(service, folder / "parts", "iterations=1")


@pytest.fixture(scope="module")
def asked_again(whole: Run, service: Service) -> tuple[RolloutAnswer, list[torch.Tensor]]:
    """The service's answer to the last iteration's request, and its BF16 images of the selected seeds."""
    config = whole.config
    prompts = prompts_of_iteration(read_prompts(catalog.prompts(), "train"), 2, config.seed, 1)
    with RolloutClient(service.url) as client:
        answer = rollout_source(config, client).candidates_of(prompts, 1, seed_root(config.seed, 1))
        images = client.rollouts(
            RolloutRequest(
                model="mini-sana",
                adapter=AdapterRef(run=config.run, version=1),
                prompts=tuple(prompts),
                candidates=Candidates(seeds=tuple(tuple(seeds) for seeds in selected(whole))),
                plan=Plan(steps=config.regenerate.steps, precision="bf16"),
                rewards=(RewardSpec(name="clipscore"),),
                images="png",
            )
        )
    return answer, [torch.stack([from_png(image) for image in group.images or ()]) for group in images.groups]


@pytest.fixture(scope="module")
def bereft(half: Run, asked_again: object, service: Service, folder: Path) -> Run:
    """Two iterations, between which the service is killed and restarted empty."""
    return go(service, folder / "bereft", "iterations=2", watcher=Watcher(restarts=service))


@pytest.fixture(scope="module")
def resumed(half: Run, bereft: Run, service: Service) -> Run:
    """The interrupted run, resumed with a service that has lost its adapters."""
    return go(service, half.config.output, "iterations=2", resume=True)


def samples(run: Run) -> IterationSamples:
    assert run.result.samples is not None
    return run.result.samples


def selections(run: Run) -> list[GroupSelection]:
    return [group.selection for group in samples(run).groups]


def selected(run: Run) -> list[list[int]]:
    return [selection.seeds for selection in selections(run)]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())


def test_a_run_goes_through_its_phases(whole: Run) -> None:
    each = ("explore", "regenerate", "train", "push")
    # A group is regenerated as soon as it arrives.
    gathering = ["explore", "regenerate"] * 2 + ["explore"]
    iterations = [(i, name) for i, name in whole.watcher.phases if name in each]
    assert iterations == [(i, name) for i in (0, 1) for name in [*gathering, "train", "push"]]
    assert [record.iteration for record in whole.watcher.records] == [0, 1]
    assert set(each) | {"evaluate", "total"} <= whole.result.seconds.keys()


def test_its_metrics_describe_this_run_and_no_earlier_one(whole: Run) -> None:
    events = [(line["event"], line["version"]) for line in whole.metrics]
    each = [(event, version) for version in (1, 2) for event in ("iteration", "push")]
    assert events == [("evaluation", 0), ("fidelity", 0), *each, ("evaluation", 2)]
    for line in whole.metrics:
        if line["event"] == "iteration":
            assert (line["precision"], line["numerics"]) == ("nvfp4", "emulated")
            assert line["explored_version"] == line["iteration"]
            assert line["seconds"].keys() == {"explore", "wait", "regenerate", "train"}
            # Exploration began before the trainer waited for it.
            assert 0 <= line["seconds"]["wait"] < line["seconds"]["explore"]
            assert line["rewards"].keys() == {"clipscore"}
            assert line["loss"] < 99
            assert line["grad_norm"] > 0
            assert line["reward_best"] >= line["reward_worst"] - 0.05


def test_every_version_is_pushed_to_the_service(whole: Run) -> None:
    versions = {info.version: info for info in whole.held.versions}
    assert list(versions) == [0, 1, 2]
    assert [info.parent for info in versions.values()] == [None, 0, 1]
    assert len({info.digest for info in versions.values()}) == 3
    for version in (1, 2):
        logged = next(line for line in whole.metrics if line["event"] == "iteration" and line["version"] == version)
        assert versions[version].digest == whole.adapter_digest(version) == logged["digest"]


def test_the_base_is_evaluated_before_and_the_average_after(whole: Run) -> None:
    before, after = whole.result.before, whole.result.after
    assert before.scores.keys() == after.scores.keys() == {"clipscore", "verifier", "verifier_graded"}
    assert before.scores["clipscore"].shape == (8, 1)
    assert len(whole.result.prompts) == len(before.images) == 8
    assert not torch.equal(before.scores["clipscore"], after.scores["clipscore"])
    assert whole.result.spearman is not None
    assert -1 <= whole.result.spearman <= 1


def test_the_kept_seeds_have_the_best_and_worst_scores_of_the_service(
    whole: Run, asked_again: tuple[RolloutAnswer, list[torch.Tensor]]
) -> None:
    answer, _ = asked_again
    for group, selection in zip(answer.groups, selections(whole), strict=True):
        assert group.prompt_id == selection.prompt.id
        index = best_worst(group.scores, 8)
        assert selection.seeds == [group.seeds[i] for i in index]
        assert selection.proxy.tolist() == pytest.approx([group.scores[i] for i in index])


def test_a_regenerated_candidate_is_the_services_bf16_image_of_its_seed(
    whole: Run, asked_again: tuple[RolloutAnswer, list[torch.Tensor]]
) -> None:
    ours = torch.stack([group.samples.images for group in samples(whole).groups])
    assert ours.shape == (2, 8, 3, 64, 64)
    theirs = torch.stack(asked_again[1])
    # The service's PNGs are additionally rounded to whole values.
    assert float((ours - theirs).abs().max()) <= 1.5 / 255
    assert float((ours - theirs.roll(1, 1)).abs().max()) > 0.1


def test_a_resumed_run_equals_the_uninterrupted_run_bit_for_bit(whole: Run, half: Run, resumed: Run) -> None:
    assert [record.iteration for record in half.watcher.records] == [0]
    assert [record.iteration for record in resumed.watcher.records] == [1]
    assert same(resumed.state, whole.state)
    assert [resumed.adapter_digest(v) for v in (1, 2)] == [whole.adapter_digest(v) for v in (1, 2)]
    assert selected(resumed) == selected(whole)
    assert all(torch.equal(v, whole.result.after.scores[name]) for name, v in resumed.result.after.scores.items())
    assert all(torch.equal(v, whole.result.before.scores[name]) for name, v in resumed.result.before.scores.items())


def test_a_resumed_runs_metrics_have_each_iteration_once(whole: Run, resumed: Run) -> None:
    def iterations(run: Run) -> list[dict[str, Any]]:
        free = {"time", "seconds"}
        return [{k: v for k, v in m.items() if k not in free} for m in run.metrics if m["event"] == "iteration"]

    assert iterations(resumed) == iterations(whole)


def test_a_resumed_run_evaluates_its_base_once(whole: Run, resumed: Run) -> None:
    def once(run: Run) -> list[tuple[str, int]]:
        return [(m["event"], m["version"]) for m in run.metrics if m["event"] in ("evaluation", "fidelity")]

    assert once(resumed) == [("evaluation", 0), ("fidelity", 0), ("evaluation", 1), ("evaluation", 2)]
    assert resumed.result.spearman == whole.result.spearman
    for phase in ("explore", "wait", "regenerate", "train"):
        lines = [m["seconds"][phase] for m in resumed.metrics if m["event"] == "iteration"]
        assert resumed.result.seconds[phase] == pytest.approx(sum(lines))


def test_a_failed_push_loses_no_line_and_is_repeated_by_the_resumed_run(service: Service, folder: Path) -> None:
    output, watcher = folder / "unpushed", Watcher()

    def failing(self: AdapterSupply, version: int, adapter: bytes) -> None:
        raise ConnectionError("gone")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AdapterSupply, "push", failing)
        with pytest.raises(ConnectionError):
            go(service, output, "iterations=1", watcher=watcher)
    assert watcher.records == []
    resumed = go(service, output, "iterations=1", resume=True)
    events = [(m["event"], m["version"]) for m in resumed.metrics]
    assert events == [("evaluation", 0), ("fidelity", 0), ("iteration", 1), ("evaluation", 1)]
    assert [info.version for info in resumed.held.versions] == [0, 1]
    assert resumed.held.versions[1].digest == resumed.adapter_digest(1) == resumed.metrics[2]["digest"]


def test_a_resumed_run_pushes_its_versions_to_an_empty_store(half: Run, resumed: Run) -> None:
    assert [(info.version, info.parent) for info in resumed.held.versions] == [(1, None), (2, 1)]
    assert resumed.held.versions[0].digest == half.held.versions[1].digest


def test_a_service_that_lost_its_adapters_gets_them_again_during_a_run(whole: Run, bereft: Run) -> None:
    assert any("had lost this run's versions 0 and 1" in note for note in bereft.watcher.notes)
    assert not any("lost" in note for note in whole.watcher.notes)
    assert [(info.version, info.parent) for info in bereft.held.versions] == [(0, None), (1, 0), (2, 1)]
    assert same(bereft.state, whole.state)
    assert bereft.held.versions[2].digest == whole.held.versions[2].digest


def test_a_finished_run_resumed_pushes_the_same_bytes_and_trains_nothing(resumed: Run, service: Service) -> None:
    state, held = resumed.state, resumed.held
    again = go(service, resumed.config.output, "iterations=2", "evaluate.prompts=1", resume=True)
    assert again.watcher.records == []
    assert same(again.state, state)
    assert again.held == held


def test_other_settings_are_refused_and_the_old_ones_kept(resumed: Run) -> None:
    config, path = resumed.config, resumed.config.output / "config.json"
    path.write_text(config.model_dump_json())
    changed = tiny_config(*SMALL, "seed=1", output=config.output, run=config.run, rollout_url=config.rollout_url)
    with pytest.raises(ValueError, match="seed: then 42, now 1"):
        run(changed, resume=True)
    assert json.loads(path.read_text())["seed"] == 42


def test_the_command_refuses_a_folder_with_another_run(taken: subprocess.Popen[str], folder: Path) -> None:
    _, said = taken.communicate(timeout=120)
    assert taken.returncode == 2
    assert said.startswith("solrl-train: ")
    assert "already contains a run" in said
    assert "--resume" in said
    assert "Traceback" not in said
    files = [path.relative_to(folder / "taken") for path in (folder / "taken").rglob("*") if path.is_file()]
    assert set(files) == {Path("config.json"), Path(".lock")}
    assert (folder / "taken" / "config.json").read_text() == "{}"


def test_a_service_of_another_run_with_the_same_name_is_not_overwritten(whole: Run, resumed: Run, folder: Path) -> None:
    """Version 1 of run "parts" is stored; another run with that name would start at version 0."""
    held = resumed.held
    with pytest.raises(ProblemError) as raised:
        train(resumed.config.model_copy(update={"output": folder / "other", "seed": 1}), Watcher())
    assert (raised.value.problem.status, raised.value.problem.kind) == (409, "run-taken")
    assert raised.value.problem.action
    with RolloutClient(resumed.config.rollout_url) as client:
        answer = client._http.get(f"/v1/runs/{resumed.config.run}/adapters")
    assert AdapterList.model_validate_json(answer.content) == held


def test_a_service_with_different_weights_is_refused_and_the_part_named(
    service: Service, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = shutil.copytree(catalog.WEIGHTS, folder / "changed")
    path = weights / "mini-sana" / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(path)
    tensors[sorted(tensors)[-1]].view(-1)[0] += 0.5
    save_file(tensors, path, metadata={"format": "pt"})
    # The name refers to the changed folder here, and to the shipped one at the service.
    monkeypatch.setattr(catalog, "mini_sana", lambda: weights / "mini-sana")
    output, watcher = folder / "refused", Watcher()
    with pytest.raises(MismatchError) as raised:
        train(tiny_config(*SMALL, output=output, run="refused", rollout_url=service.url), watcher)
    error = raised.value
    assert (error.fault, error.where) == ("digests", "transformer")
    assert "transformer" in (error.action or "")
    assert watcher.phases == []
    assert not (output / "checkpoints").exists()
    assert service.running.client.get("/v1/runs/refused/adapters").status_code == 404


def test_an_unreachable_service_is_one_clear_message(unreachable: subprocess.Popen[str], folder: Path) -> None:
    _, said = unreachable.communicate(timeout=120)
    assert unreachable.returncode == 2
    message = next(line for line in said.splitlines() if line.startswith("solrl-train: "))
    assert "no answer from http://127.0.0.1:" in message
    assert "solrl-rollout serve" in message
    assert "Traceback" not in said
    assert not (folder / "alone" / "checkpoints").exists()


def test_a_pruned_plan_trains_on_survivors(service: Service, folder: Path) -> None:
    pruned = go(service, folder / "pruned", "iterations=1", "explore.prune={after: 1, keep: 10}", "explore.steps=3")
    with RolloutClient(service.url) as client:
        source, root = rollout_source(pruned.config, client), seed_root(pruned.config.seed, 0)
        asked = source.candidates_of([selection.prompt for selection in selections(pruned)], 0, root)
    for selection, group in zip(selections(pruned), asked.groups, strict=True):
        survivors = {seed for seed, score in zip(group.seeds, group.scores, strict=True) if score is not None}
        assert len(survivors) == 10
        assert len(selection.seeds) == 8
        assert set(selection.seeds) <= survivors
    assert pruned.result.spearman is not None


@pytest.fixture(scope="module")
def lagging(service: Service, folder: Path) -> Run:
    """A run that explores two versions behind."""
    return go(service, folder / "lagging", "iterations=4", "explore.lag=2", "explore.prompts=1")


def test_a_lag_is_constant_and_recorded(lagging: Run) -> None:
    lines = [line for line in lagging.metrics if line["event"] == "iteration"]
    assert [line["explored_version"] for line in lines] == [0, 0, 0, 1]
    # The stale version selected the last iteration's training seeds.
    config = lagging.config
    prompts = prompts_of_iteration(read_prompts(catalog.prompts(), "train"), 1, config.seed, 3)
    with RolloutClient(config.rollout_url) as client:
        answer = rollout_source(config, client).candidates_of(prompts, 1, seed_root(config.seed, 3))
    index = best_worst(answer.groups[0].scores, config.explore.keep)
    assert selected(lagging)[0] == [answer.groups[0].seeds[i] for i in index]


def test_a_resumed_lagging_run_is_the_same_bit_for_bit_after_the_service_lost_everything(
    lagging: Run, service: Service, folder: Path
) -> None:
    settings = ("explore.lag=2", "explore.prompts=1")
    part = go(service, folder / "lagging-parts", "iterations=3", *settings)
    with RolloutClient(service.url) as client:
        client.delete(part.config.run)
    resumed = go(service, folder / "lagging-parts", "iterations=4", *settings, resume=True)
    assert resumed.adapter_digest(4) == lagging.adapter_digest(4)
    assert [info.version for info in resumed.held.versions] == [1, 2, 3, 4]


def test_a_resumed_run_rewinds_versions_pushed_after_its_checkpoint(
    service: Service, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = go(service, output := folder / "beyond", "iterations=2", "explore.prompts=1")
    shutil.rmtree(output / "checkpoints" / "000002")
    service.running.client.put("/v1/runs/beyond/adapters/0/pin").raise_for_status()
    monkeypatch.delattr(RolloutClient, "rewind")
    with pytest.raises(AttributeError, match="rewind"):
        go(service, output, "iterations=2", "explore.prompts=1", resume=True)
    monkeypatch.undo()
    again = go(service, output, "iterations=2", "explore.prompts=1", resume=True)
    assert again.adapter_digest(2) == first.held.versions[2].digest
    assert ([info.version for info in again.held.versions], again.held.pinned) == ([0, 1, 2], (0,))
    assert service.running.client.get("/v1/runs/beyond/iterations").json()["curve"]["iterations"] == [0, 1]


class Stopping(Watcher):
    """Stops the run after its first iteration."""

    def finished(self, record: IterationRecord) -> None:
        raise KeyboardInterrupt


def test_a_run_that_pushed_and_stopped_before_its_first_checkpoint_is_resumed(service: Service, folder: Path) -> None:
    output, settings = folder / "early", ("iterations=2", "checkpoint_every=2", "explore.prompts=1")
    with pytest.raises(KeyboardInterrupt):
        go(service, output, *settings, watcher=Stopping())
    assert service.adapters("early").head == 1
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


def test_resuming_in_an_empty_folder_does_not_delete_another_run(service: Service, folder: Path) -> None:
    """Version 0 is the same in every run of one seed."""
    other = go(service, folder / "named", "iterations=1", "explore.prompts=1", "evaluate.prompts=1")
    with pytest.raises(ProblemError) as raised:
        train(other.config.model_copy(update={"output": folder / "empty"}), Watcher(), resume=True)
    assert raised.value.problem.kind == "run-taken"
    assert service.adapters("named") == other.held
