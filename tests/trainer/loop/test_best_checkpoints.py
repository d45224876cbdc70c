"""The checkpoint of the best held-out reward outlives newer ones, and a note names it if it is better beyond chance."""

import logging
from pathlib import Path

import pytest
from real_runs import Service, go
from solrl_trainer.evaluation.held_out import log_better_checkpoint
from solrl_trainer.records.metrics_file import MetricsFile
from solrl_trainer.records.run_log import RunLog
from solrl_trainer.settings.presets import resolve

SETTINGS = ("explore.prompts=1", "evaluate.prompts=2", "evaluate.every=1", "keep_checkpoints=1", "iterations=3")


def test_the_best_evaluated_version_is_kept(service: Service, folder: Path) -> None:
    run = go(service, folder / "best", *SETTINGS)
    name = next(iter(run.config.weights))
    found = {line["version"]: line["rewards"][name] for line in run.metrics if line["event"] == "evaluation"}
    assert set(found) == {0, 1, 2, 3}
    best = max((1, 2), key=found.__getitem__)
    assert sorted(path.name for path in (run.config.output / "checkpoints").iterdir()) == [f"{best:06d}", "000003"]


@pytest.mark.parametrize(("low", "named"), [(0.52, True), (0.49, False)])
def test_only_a_difference_beyond_the_interval_is_named(
    low: float, named: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = resolve("mini-sana/sol_rl/clipscore", overrides=["iterations=4"], arguments={"output": tmp_path}).config
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    for version, mean, ends in ((2, 0.55, (low, 0.58)), (4, 0.5, (0.47, 0.53))):
        interval = {end: {"clipscore": value} for end, value in zip(("low", "high"), ends, strict=True)}
        metrics.log("evaluation", version=version, images=8, rewards={"clipscore": mean}, **interval)
        (tmp_path / "checkpoints" / f"{version:06d}").mkdir(parents=True)
    with caplog.at_level(logging.INFO):
        log_better_checkpoint(config, RunLog(metrics))
    assert ("--checkpoint 2" in caplog.text) == named
