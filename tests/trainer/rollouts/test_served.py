"""A trainer that explores a share beside its service: the same run bit for bit; and services that lack something."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from solrl_client.rollouts import RolloutClient
from solrl_proto.models import ModelInfo, ModelList
from solrl_proto.rollouts import PromptItem
from solrl_trainer.__main__ import main
from solrl_trainer.loop import Result, train
from solrl_trainer.rollouts import loading
from solrl_trainer.rollouts.device_source import DeviceSource
from solrl_trainer.rollouts.groups import CandidateGroup
from solrl_trainer.settings.presets import resolve
from tests.support.service_helpers import RunningService, running_service
from tests.support.small_model import small_model
from tests.support.typed import refused
from tests.trainer.real_runs import Watcher
from tests.trainer.training_helpers import TINY, events, sets, tiny_config, unclocked

Line = dict[str, Any]

SMALL = (
    f"model={small_model()}",
    *("explore.prompts=3", "explore.candidates=8", "explore.keep=4", "explore.precision=nvfp4", "explore.steps=2"),
    *("regenerate.steps=2", "iterations=3", "optimizer.updates=1", "optimizer.batch=6", "lora.rank=2"),
    *("evaluate.prompts=1", "evaluate.seeds=1", "evaluate.steps=1", "evaluate.fidelity_prompts=1"),
    *("rewards={clipscore: 1, verifier: 0}", "optimizer.learning_rate=1e-2", "algorithm.global_std=false"),
)


@dataclass
class Run:
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
    """A run whose service explores every prompt."""
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
def explored_here(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Iteration, merged version and number of prompts of each exploration by the trainer's device."""
    found: list[tuple[int, int, int]] = []
    make = DeviceSource.groups

    def groups(self: DeviceSource, prompts: Sequence[PromptItem], iteration: int) -> Iterator[CandidateGroup]:
        found.append((iteration, self.models.version, len(prompts)))
        return make(self, prompts, iteration)

    monkeypatch.setattr(DeviceSource, "groups", groups)
    return found


def test_a_share_that_the_trainer_explores_has_the_same_bits_also_when_resumed(
    lag: int, here: Run, service: RunningService, explored_here: list[tuple[int, int, int]], tmp_path: Path
) -> None:
    folder = tmp_path / f"divided-{lag}"
    settings = (f"explore.lag={lag}", "explore.share=0.3", "keep_checkpoints=3")
    require_equal(here, go(folder, service.url, *settings))
    lines = events(folder, "iteration")
    assert all(line["seconds"]["explore_here"] >= 0 for line in lines)
    by = {(one["by"], line["iteration"]) for line in lines for one in line["scoring"] if one["of"] == "candidates"}
    assert ("service", 0) in by
    assert ("trainer", 0) in by
    assert explored_here == [(i, max(0, i - lag), 2) for i in range(3)]
    explored_here.clear()
    require_equal(here, go(folder, service.url, *settings, resume=True, checkpoint=1))
    assert explored_here == [(1, 1 - lag, 2), (2, 2 - lag, 2)]


@pytest.mark.slow
def test_a_share_of_stochastic_candidates_has_the_same_bits(service: RunningService, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("dry", [True, False])
def test_a_service_without_the_precision_is_refused_before_anything_is_loaded(
    dry: bool, service: RunningService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service that offers one precision alone, as with vLLM-Omni at --precision fp8."""
    find = RolloutClient.find_model

    def find_model(self: RolloutClient, listed: ModelList, name: str) -> ModelInfo:
        found = find(self, listed, name)
        others = tuple(info for info in found.precisions if info.precision != "bf16")
        return found.model_copy(update={"precisions": others})

    monkeypatch.setattr(RolloutClient, "find_model", find_model)
    monkeypatch.setattr(loading, "load_backbone", lambda *_, **__: pytest.fail("the model was loaded"))
    words = ["--rollout-url", service.url, "--output", str(tmp_path / "run"), *["--dry-run"] * dry]
    message = refused(main, "run", *words, *sets(*TINY, *SMALL, "explore.precision=bf16")).splitlines()[-1]
    assert message.startswith("solrl-train: Precision is not supported here")
    offered = (
        f"the service at {service.url} does not generate in bf16; at explore.precision; got 'bf16'; expected ['nvfp4']"
    )
    assert offered in message
    assert "set explore.precision=auto, or use a service that offers bf16" in message
