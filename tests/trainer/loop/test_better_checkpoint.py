"""The end of a run names a kept checkpoint whose held-out reward is higher than the last one's beyond chance."""

import logging
from pathlib import Path

import pytest
from solrl_trainer.evaluation.held_out import log_better_checkpoint
from solrl_trainer.records.metrics_file import MetricsFile
from solrl_trainer.records.run_log import RunLog
from solrl_trainer.settings.presets import resolve


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
