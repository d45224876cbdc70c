"""Uninterrupted runs: phases, metrics, versions, evaluations, lagging exploration, and the best checkpoint."""

import logging
from pathlib import Path

import pytest
import torch
from solrl_client.rollouts import RolloutClient
from solrl_minis import catalog
from solrl_trainer.evaluation.held_out import log_better_checkpoint
from solrl_trainer.prompts.prompt_sets import prompts_of_iteration, read_prompts
from solrl_trainer.records.run_log import RunLog
from solrl_trainer.rollouts.exploration import seed_root
from solrl_trainer.rollouts.selection import best_worst
from solrl_trainer.run_folder.metrics_file import MetricsFile
from solrl_trainer.service.run_requests import RunRequests
from solrl_trainer.settings.presets import resolve
from tests.trainer.real_runs import Run, Service, go, selected


def test_a_run_goes_through_its_phases_between_two_evaluations(whole: Run) -> None:
    each = ("explore", "regenerate", "train", "push")
    # The evaluations before and after show their progress.
    assert whole.watcher.measured.count(0) == whole.watcher.measured.count(1) == 2
    for iteration in (0, 1):
        *gathering, train, push = (name for i, name in whole.watcher.phases if i == iteration and name in each)
        assert (train, push) == ("train", "push")
        # A group is regenerated as soon as it arrives.
        assert gathering[:2] == ["explore", "regenerate"]
        assert set(gathering) == {"explore", "regenerate"}
    assert [record.iteration for record in whole.watcher.records] == [0, 1]
    assert set(each) | {"evaluate", "total"} <= whole.result.seconds.keys()
    first = whole.watcher.notes[0]
    assert first.startswith(f"loading {whole.config.model}; layout: 1 ")
    assert first.endswith(f" regenerates and trains; {whole.config.service_url} explores (lag 0)")
    before, after = whole.result.before, whole.result.after
    assert before.scores.keys() == after.scores.keys() == {"clipscore", "verifier", "verifier_graded", "judge"}
    assert before.scores["clipscore"].shape == (4, 1)
    assert len(whole.result.prompts) == len(before.images) == 4
    assert not torch.equal(before.scores["clipscore"], after.scores["clipscore"])
    assert list(whole.result.spearman) == [0]
    assert -1 <= whole.result.spearman[0] <= 1


def test_its_metrics_describe_this_run_and_every_version_is_pushed_to_the_service(whole: Run) -> None:
    events = [(line["event"], line["version"]) for line in whole.metrics]
    each = [(event, version) for version in (1, 2) for event in ("iteration", "push")]
    assert events == [("evaluation", 0), ("fidelity", 0), *each, ("evaluation", 2)]
    for line in whole.metrics:
        if line["event"] == "iteration":
            assert (line["precision"], line["numerics"]) == ("nvfp4", "emulated")
            assert line["explored_version"] == line["iteration"]
            assert line["seconds"].keys() == {"explore", "wait", "regenerate", "train"}
            assert line["rewards"].keys() == {"clipscore"}
            assert line["loss"] < 99
            assert line["grad_norm"] > 0
            assert line["reward_best"] >= line["reward_worst"] - 0.05
    versions = {info.version: info for info in whole.held.versions}
    assert list(versions) == [0, 1, 2]
    assert [info.parent for info in versions.values()] == [None, 0, 1]
    assert len({info.digest for info in versions.values()}) == 3
    for version in (1, 2):
        logged = next(line for line in whole.metrics if line["event"] == "iteration" and line["version"] == version)
        assert versions[version].digest == whole.adapter_digest(version) == logged["digest"]


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
        answer = RunRequests(config, client).candidates_of(prompts, 1, seed_root(config.seed, 3), iteration=3)
    index = best_worst(answer.groups[0].scores, config.explore.keep)
    assert selected(lagging)[0] == [answer.groups[0].seeds[i] for i in index]


def test_a_resumed_lagging_run_is_the_same_after_all_is_lost(lagging: Run, service: Service, folder: Path) -> None:
    settings = ("explore.lag=2", "explore.prompts=1")
    part = go(service, folder / "lagging-parts", "iterations=3", *settings)
    with RolloutClient(service.url) as client:
        client.delete(part.config.run)
    resumed = go(service, folder / "lagging-parts", "iterations=4", *settings, resume=True)
    assert resumed.adapter_digest(4) == lagging.adapter_digest(4)
    assert [info.version for info in resumed.held.versions] == [1, 2, 3, 4]


SETTINGS = ("explore.prompts=1", "evaluate.prompts=2", "evaluate.every=1", "keep_checkpoints=1", "iterations=3")


def test_the_best_evaluated_version_is_kept(service: Service, folder: Path) -> None:
    run = go(service, folder / "best", *SETTINGS)
    name = next(iter(run.config.weights))
    found = {line["version"]: line["rewards"][name] for line in run.metrics if line["event"] == "evaluation"}
    assert set(found) == {0, 1, 2, 3}
    best = max((1, 2), key=found.__getitem__)
    assert sorted(path.name for path in (run.config.output / "checkpoints").iterdir()) == [f"{best:06d}", "000003"]


@pytest.mark.parametrize(("high", "named"), [(0.54, True), (0.56, False)])
def test_only_a_sure_loss_is_named(high: float, named: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = resolve("mini-sana/sol_rl/clipscore", overrides=["iterations=4"], arguments={"output": tmp_path}).config
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    for version, mean, ends in ((2, 0.55, (0.52, 0.58)), (4, 0.5, (0.47, high))):
        interval = {end: {"clipscore": value} for end, value in zip(("low", "high"), ends, strict=True)}
        metrics.log("evaluation", version=version, images=8, rewards={"clipscore": mean}, **interval)
        (tmp_path / "checkpoints" / f"{version:06d}").mkdir(parents=True)
    with caplog.at_level(logging.INFO):
        log_better_checkpoint(config, RunLog(metrics))
    assert ("--checkpoint 2" in caplog.text) == named
