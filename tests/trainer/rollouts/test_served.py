"""Regeneration at a service: the same run bit for bit, and no run on samples that this process would not make."""

import base64
import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from real_runs import Watcher
from service_helpers import RunningService, running_service
from small_model import small_model
from solrl_client import rollouts
from solrl_client.rollouts import RolloutClient
from solrl_client.transport import stream_lines
from solrl_proto.models import ModelInfo
from solrl_proto.problems import ProblemError
from solrl_proto.rollouts import PromptItem
from solrl_trainer.algorithms.training_data import TrainingSamples
from solrl_trainer.commands.cli import main
from solrl_trainer.loop import Result, train
from solrl_trainer.policy.update import OneStep
from solrl_trainer.rollouts import loading
from solrl_trainer.rollouts.device_source import DeviceSource
from solrl_trainer.rollouts.groups import CandidateGroup
from solrl_trainer.service import service_source
from solrl_trainer.service.regenerator import ServiceRegenerator
from solrl_trainer.settings.preflight import check_run
from solrl_trainer.settings.presets import resolve
from training_helpers import TINY, events, sets, tiny_config, unclocked
from typed import accepted, refused

Line = dict[str, Any]

SMALL = (
    f"model={small_model()}",
    *("explore.prompts=3", "explore.candidates=8", "explore.keep=4", "explore.precision=nvfp4", "explore.steps=2"),
    *("regenerate.steps=2", "iterations=3", "optimizer.updates=1", "optimizer.batch=6", "lora.rank=2"),
    *("evaluate.prompts=1", "evaluate.seeds=1", "evaluate.steps=1", "evaluate.fidelity_prompts=1"),
    *("rewards={clipscore: 1, verifier: 0}", "optimizer.learning_rate=1e-2", "algorithm.global_std=false"),
)
"""Advantages need their group alone, so a run that trains on samples as they arrive has the bits of one that waits."""
AT_SERVICE = "regenerate.at=service"


@dataclass
class Run:
    """A finished training."""

    result: Result
    metrics: list[Line]
    """Without clocks."""


def go(folder: Path, url: str, *settings: str, **arguments: Any) -> Run:
    config = tiny_config(*SMALL, *settings, output=folder, run=folder.name, rollout_url=url)
    folder.mkdir(exist_ok=True)
    return Run(train(config, Watcher(), **arguments), unclocked(folder))


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    with running_service("--rewards", "clipscore", "verifier", model=small_model()) as running:
        yield running


@pytest.fixture(scope="module", params=[pytest.param(0, marks=pytest.mark.release), 1], ids=["lag 0", "lag 1"])
def lag(request: pytest.FixtureRequest) -> int:
    assert isinstance(request.param, int)
    return request.param


@pytest.fixture(scope="module")
def here(lag: int, service: RunningService, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that regenerates in the trainer."""
    return go(tmp_path_factory.mktemp("served") / f"here-{lag}", service.url, f"explore.lag={lag}")


def require_equal(one: Run, other: Run) -> None:
    """Both runs trained on the same samples, and ended with the same weights."""
    assert one.metrics == other.metrics
    assert sum("digest" in line for line in one.metrics) == 3
    for ours, theirs in zip(one.result.samples.groups, other.result.samples.groups, strict=True):
        assert ours.prompt == theirs.prompt
        assert ours.seeds == theirs.seeds
        assert torch.equal(ours.samples.latents, theirs.samples.latents)
        assert torch.equal(ours.samples.scores, theirs.samples.scores)
        assert torch.equal(ours.samples.images, theirs.samples.images)
        assert ours.samples.rewards.keys() == theirs.samples.rewards.keys() == {"clipscore", "verifier"}
        for name, values in ours.samples.rewards.items():
            assert torch.equal(values, theirs.samples.rewards[name])
    for name, values in one.result.after.scores.items():
        assert torch.equal(values, other.result.after.scores[name])
    assert torch.equal(one.result.after.images, other.result.after.images)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, str]]:
    """Version, number of seeds and prompt of each request for samples."""
    found: list[tuple[int, int, str]] = []
    ask = ServiceRegenerator.samples_of

    def samples_of(self: ServiceRegenerator, selection: CandidateGroup, version: int, adapter: str) -> Any:
        found.append((version, len(selection.seeds), selection.prompt.id))
        return ask(self, selection, version, adapter)

    monkeypatch.setattr(ServiceRegenerator, "samples_of", samples_of)
    return found


@pytest.mark.parametrize(("share", "prompts"), [(1.0, 3), (0.4, 1)])
def test_a_service_regenerates_the_same_samples_bit_for_bit_also_when_resumed(
    share: float,
    prompts: int,
    lag: int,
    here: Run,
    service: RunningService,
    asked: list[tuple[int, int, str]],
    tmp_path: Path,
) -> None:
    folder = tmp_path / f"served-{lag}-{prompts}"
    settings = (f"explore.lag={lag}", AT_SERVICE, f"regenerate.share={share}")
    require_equal(here, go(folder, service.url, *settings))
    lines = events(folder, "iteration")
    samples = {("samples", name, by) for name in ("clipscore", "verifier") for by in ("service", "trainer")}
    expected = {one for one in samples if share < 1 or one[2] == "service"} | {("candidates", "clipscore", "service")}
    assert {(one["of"], one["reward"], one["by"]) for line in lines for one in line["scoring"]} == expected
    # Never under the lagged version.
    assert sorted((version, seeds) for version, seeds, _ in asked) == [(i, 4) for i in range(3) for _ in range(prompts)]
    # This device regenerates the first prompts.
    last = {prompt.id for prompt in here.result.samples.prompts[-prompts:]}
    assert {prompt for version, _, prompt in asked if version == 2} == last
    if share == 1:
        require_equal(here, go(folder, service.url, *settings, resume=True, checkpoint=2))


@pytest.fixture
def explored_here(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Iteration, merged version and number of prompts of each exploration by the trainer's device."""
    found: list[tuple[int, int, int]] = []
    make = DeviceSource.groups

    def groups(self: DeviceSource, prompts: Sequence[PromptItem], iteration: int) -> Iterator[CandidateGroup]:
        found.append((iteration, self.models.version, len(prompts)))
        return make(self, prompts, iteration)

    monkeypatch.setattr(DeviceSource, "groups", groups)
    return found


@pytest.mark.parametrize(("share", "prompts"), [("0.3", 2), ("auto", 1)])
def test_a_share_that_the_trainer_explores_has_the_same_bits_also_when_resumed(
    share: str,
    prompts: int,
    lag: int,
    here: Run,
    service: RunningService,
    explored_here: list[tuple[int, int, int]],
    tmp_path: Path,
) -> None:
    folder = tmp_path / f"divided-{lag}-{share}"
    settings = (f"explore.lag={lag}", f"explore.share={share}", "keep_checkpoints=3", AT_SERVICE)
    require_equal(here, go(folder, service.url, *settings))
    lines = events(folder, "iteration")
    assert all(line["seconds"]["explore_here"] >= 0 for line in lines)
    by = {(one["by"], line["iteration"]) for line in lines for one in line["scoring"] if one["of"] == "candidates"}
    assert ("service", 0) in by
    assert ("trainer", 0) in by
    versions = [(iteration, version) for iteration, version, _ in explored_here]
    expected = [(i, max(0, i - lag)) for i in range(3)]
    if share == "auto":  # times decide what this device explores after the first iteration
        assert versions[0] == (0, 0)
        assert set(versions) <= set(expected)
    else:
        assert versions == expected
        assert {count for _, _, count in explored_here} == {prompts}
        explored_here.clear()
        require_equal(here, go(folder, service.url, *settings, resume=True, checkpoint=1))
        assert explored_here == [(1, 1 - lag, prompts), (2, 2 - lag, prompts)]


@pytest.mark.slow
def test_a_share_of_pruned_and_stochastic_candidates_has_the_same_bits(service: RunningService, tmp_path: Path) -> None:
    """Of a moving window of stochastic steps, those of the iteration that is explored ahead."""
    overrides = [
        *SMALL,
        *("explore.steps=4", "regenerate.steps=4", "algorithm.window_order=progressive", "algorithm.window_within=1"),
        *("explore.lag=1", "optimizer.learning_rate=1e-3", f"rollout_url={service.url}"),
    ]
    overrides.remove("algorithm.global_std=false")

    def lines(share: float) -> list[Line]:
        folder = tmp_path / f"moving-{share}"
        own = [*overrides, f"explore.share={share}", f"run={folder.name}", f"output={folder}"]
        folder.mkdir()
        train(resolve("mini-sana/flowgrpo_fast_two_stage/clipscore", overrides=own).config, Watcher())
        names = ("digest", "proxy_mean", "reward_mean")
        return [{name: line[name] for name in names} for line in events(folder, "iteration")]

    assert lines(0.3) == lines(1.0)


def test_training_begins_on_arrival(service: RunningService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last prompt's samples are withheld until the first prompt's gradient is there."""
    trained, added, ask = threading.Event(), list[int](), ServiceRegenerator.samples_of
    add = OneStep.add

    def samples_of(self: ServiceRegenerator, selection: CandidateGroup, version: int, adapter: str) -> Any:
        if selection.prompt == self._device.own_prompts(version)[-1]:
            assert trained.wait(120)
        return ask(self, selection, version, adapter)

    def noted(self: OneStep, place: int, samples: TrainingSamples) -> None:
        add(self, place, samples)
        added.append(place)
        trained.set()

    monkeypatch.setattr(ServiceRegenerator, "samples_of", samples_of)
    monkeypatch.setattr(OneStep, "add", noted)
    go(tmp_path, service.url, "run=early", "iterations=1", AT_SERVICE)
    assert added == [0, 1, 2]


def test_a_resumed_run_divides_by_the_same_deviation(service: RunningService, tmp_path: Path) -> None:
    """With global_std, the first iteration waits for all samples; later ones need the rewards of the one before."""
    settings = (AT_SERVICE, "explore.lag=1", "algorithm.global_std=true")
    whole = go(tmp_path / "whole", service.url, *settings)
    require_equal(whole, go(tmp_path / "whole", service.url, *settings, resume=True, checkpoint=2))
    waiting = go(tmp_path / "waiting", service.url, *settings, "optimizer.streamed=false", "iterations=2")
    digests = [[line["digest"] for line in run.metrics if "digest" in line] for run in (whole, waiting)]
    assert digests[0][0] == digests[1][0]
    assert digests[0][1] != digests[1][1]


def test_another_arithmetic_may_round_differently(
    service: RunningService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notes: list[str]
) -> None:
    """A changed bit is noted; latents a tenth off and latents of another seed are refused."""
    monkeypatch.setattr(service_source, "arithmetic", lambda device: {"device": "another"})
    folder = tmp_path / "rounding"
    folder.mkdir()
    once = (*SMALL, AT_SERVICE, "iterations=1")
    config = tiny_config(*once, output=folder, run="rounding", rollout_url=service.url)
    monkeypatch.setattr(rollouts, "stream_lines", telling(change_a_bit))
    train(config, Watcher())
    assert any("latents of the service differ by rounding" in note for note in notes)
    for lie in (put_a_tenth_off, rotate_values):
        monkeypatch.setattr(rollouts, "stream_lines", telling(lie))
        with pytest.raises(ProblemError, match=r"at most 0\.05"):
            go(tmp_path / lie.__name__, service.url, AT_SERVICE)


Lie = Callable[[Line], None]


def values_of(group: Line) -> list[bytearray]:
    return [bytearray(base64.b64decode(value)) for value in group["latents"]["values"]]


def set_values(group: Line, values: list[bytearray]) -> None:
    group["latents"]["values"] = [base64.b64encode(value).decode() for value in values]
    group["latents"]["digest"] = f"sha256:{hashlib.sha256(b''.join(values)).hexdigest()}"


def change_a_bit(line: Line) -> None:
    values = values_of(line)
    for value in values:
        value[0] ^= 1
    set_values(line, values)


def put_a_tenth_off(line: Line) -> None:
    """Scale the latents, so that they differ by a tenth of their root mean square."""
    values = values_of(line)
    for value in values:
        torch.frombuffer(value, dtype=torch.float32).mul_(1.1)
    set_values(line, values)


def rotate_values(line: Line) -> None:
    values = values_of(line)
    set_values(line, values[1:] + values[:1])


def telling(lie: Lie) -> Callable[[httpx.Response, int], Iterator[bytes]]:
    """`stream_lines` of a service that changes groups with latents."""

    def lines(answer: httpx.Response, limit: int) -> Iterator[bytes]:
        for text in stream_lines(answer, limit):
            line = json.loads(text)
            if "latents" in line:
                lie(line)
            yield json.dumps(line).encode()

    return lines


def test_latents_with_a_changed_bit_stop_the_run(
    service: RunningService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollouts, "stream_lines", telling(change_a_bit))
    with pytest.raises(ProblemError, match=r"latents of seed .*of their root mean square.*the same bits") as raised:
        go(tmp_path, service.url, "run=lie", AT_SERVICE)
    assert raised.value.problem.kind == "served-differently"
    assert raised.value.problem.action


def test_rewards_that_the_service_lacks_are_refused(service: RunningService, tmp_path: Path) -> None:
    logged = "rewards={clipscore: 1, verifier_graded: 0}"
    config = tiny_config(*SMALL, logged, AT_SERVICE, output=tmp_path / "run", rollout_url=service.url)
    with pytest.raises(ProblemError, match="does not score verifier_graded"):
        check_run(config, resume=False)
    with pytest.raises(ValueError, match=r"'Juge' \(did you mean 'Judge'\?\)"):
        go(tmp_path, service.url, "rewards={solrl_minis.judge:Juge: 1}", "run=misspelt")


@pytest.mark.parametrize("dry", [True, False])
@pytest.mark.parametrize(
    ("settings", "setting", "instead"),
    [
        (("explore.precision=auto", AT_SERVICE), "regenerate.at", "regenerate.at=trainer"),
        (("explore.precision=bf16",), "explore.precision", "explore.precision=auto"),
    ],
)
def test_a_service_without_the_precision_is_refused_before_anything_is_loaded(
    settings: tuple[str, ...],
    setting: str,
    instead: str,
    dry: bool,
    service: RunningService,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A service that offers one precision alone, as with vLLM-Omni at --precision fp8."""
    find = RolloutClient.model

    def model(self: RolloutClient, name: str) -> ModelInfo:
        found = find(self, name)
        others = tuple(info for info in found.precisions if info.precision != "bf16")
        return found.model_copy(update={"precisions": others})

    monkeypatch.setattr(RolloutClient, "model", model)
    monkeypatch.setattr(loading, "load_backbone", lambda *_, **__: pytest.fail("the model was loaded"))
    words = ["--rollout-url", service.url, "--output", str(tmp_path / "run"), *["--dry-run"] * dry]
    message = refused(main, "run", *words, *sets(*TINY, *SMALL, *settings)).splitlines()[-1]
    assert message.startswith("solrl-train: Precision is not supported here")
    offered = f"the service at {service.url} does not generate in bf16; at {setting}; got 'bf16'; expected ['nvfp4']"
    assert offered in message
    assert f"set {instead}, or use a service that offers bf16" in message


def test_a_service_with_the_precision_is_accepted(service: RunningService, tmp_path: Path) -> None:
    words = ("--rollout-url", service.url, "--output", str(tmp_path / "run"), "--dry-run")
    assert accepted(main, "run", *words, *sets(*TINY, *SMALL, AT_SERVICE)).stderr == ""
