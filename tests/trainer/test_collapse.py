"""The warning of a run that may be collapsing: once, when its gradients have grown."""

from dataclasses import replace
from pathlib import Path

import pytest
from solrl_trainer.records.run_log import RunLog
from solrl_trainer.run_folder.metrics_file import MetricsFile
from solrl_trainer.run_folder.resuming import Change
from tests.trainer.run_folders import iteration_record


def train(log: RunLog, norms: list[float], version: int = 0) -> None:
    for i, norm in enumerate(norms, version):
        record = iteration_record(i)
        log.iteration_trained(replace(record, update=replace(record.update, grad_norm=norm)))


@pytest.mark.parametrize(
    "norms",
    [[1.0] * 5 + [9.0] * 9, [1.0] * 5 + [99.0] * 2 + [1.0] * 5, [0.0] * 5 + [1.0] * 5, [1.0, 99.0]],
    ids=["less than 10 times", "two iterations", "a reward without spread at first", "a short run"],
)
def test_a_run_that_goes_well_is_silent(norms: list[float], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(RunLog(MetricsFile(tmp_path / "metrics.jsonl")), norms)
    assert not caplog.messages


def test_grown_gradients_are_said_once_also_after_a_resume(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    log = RunLog(metrics)
    train(log, [0.02] * 5 + [0.5] * 9)
    resumed = RunLog(metrics)
    resumed.rewind(5)
    resumed.changed(5, [])
    train(resumed, [0.5] * 9)
    assert len(caplog.messages) == 2
    assert all("gradient norm has grown from 0.02 to 0.5. See docs/troubleshooting.md#" in it for it in caplog.messages)


@pytest.mark.parametrize(
    ("name", "warns"), [("algorithm.beta", False), ("rewards:clipscore", False), ("explore.steps", True)]
)
def test_gradients_are_compared_since_the_newest_change_of_their_scale(
    name: str, warns: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    train(RunLog(metrics), [0.1] * 10)
    for version, changes in ((10, [Change(name, 1.0, 0.05)]), (13, [])):
        log = RunLog(metrics)
        log.rewind(version)
        log.changed(version, changes)
        train(log, [2.0] * 3, version)
    assert any("may be collapsing" in message for message in caplog.messages) == warns
