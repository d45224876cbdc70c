"""The alarm for collapse: silent on a run that goes well, and once, with what to change, on one that does not."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from solrl_proto.status import Spread
from solrl_trainer.records.collapse import CollapseAlarm, collapse
from solrl_trainer.records.run_log import RunLog
from solrl_trainer.run_folder.metrics_file import MetricsFile
from solrl_trainer.run_folder.resuming import Change
from tests.trainer.run_folders import iteration_record


def lines(count: int, **figures: Any) -> list[dict[str, Any]]:
    """A run whose spread falls to half, and whose policy moves evenly away: squared distances grow as i²."""
    made = []
    for i in range(count):
        line = {"version": i + 1, "reward_best": 0.3, "reward_worst": 0.2 + 0.05 * i / count}
        line |= {"objective/kl": 1e-6 * i**2, "objective/old_kl": 1e-7}
        line |= {"objective/ratio": 1.0, "objective/clipped": 0.3}
        made.append(line | {name.replace("_", "/", 1): value(i) for name, value in figures.items()})
    return made


@pytest.mark.parametrize("count", [1, 15, 40])
def test_a_run_that_goes_well_is_silent(count: int) -> None:
    assert all(collapse(lines(count)[:done], steps=2) is None for done in range(1, count + 1))


def test_a_distance_from_zero_is_no_growth() -> None:
    assert collapse(lines(15, objective_kl=lambda i: float(i > 12))) is None
    assert collapse(lines(15, objective_old_kl=lambda i: 1e-14 if i < 10 else 1e-11)) is None, "rounding"
    assert collapse([{**line, "reward_best": 0.0, "reward_worst": 0.0} for line in lines(15)]) is None


def test_broken_models_and_lost_spread_are_named() -> None:
    found = lines(3, reward_best=lambda i: 0.3)
    for i, line in enumerate(found):
        line |= {"reward_best": 0.52, "reward_worst": 0.32} if i == 0 else {"reward_best": 0.1, "reward_worst": -0.15}
    said = collapse(found)
    assert said.startswith(
        "the best samples of a prompt score 0.1, and the worst of the first iteration 0.32: the model"
    )
    assert "Go back, and lower optimizer.learning_rate" in said
    assert collapse(found[:2]) is None, "one iteration may have hard prompts"
    assert collapse([*found[:2], found[0]]) is None
    assert collapse([found[0] | {"weights": {"ocr": 2.0}}, *found[1:]]) is None, "scores of another scale"
    found = [{**line, "reward_worst": 0.295 if line["version"] > 10 else 0.2} for line in lines(15)]
    said = collapse(found)
    assert said.startswith("the best and worst samples of a prompt score 0.005 apart, and at first 0.1: its images are")
    assert "lower optimizer.learning_rate, or raise algorithm.kl_weight" in said
    assert collapse(found[:14]) is None, "the mean of five iterations decides"


@pytest.mark.parametrize("name", ["objective_kl", "objective_old_kl", "objective_old_distance"])
def test_a_policy_that_diverges_is_named(name: str) -> None:
    said = collapse(lines(15, **{name: lambda i: 1e-5 if i < 13 else 1e-2}))
    assert f"({name.replace('_', '/', 1)}): the policy diverges" in said


def test_ratios_beyond_the_clip_range_are_named() -> None:
    said = collapse(lines(5, objective_clipped=lambda i: 0.95))
    assert said.startswith("95 % of all points are beyond the clip range")
    assert said.endswith("or take fewer optimizer.updates")
    assert collapse(lines(5, objective_clipped=lambda i: 0.48), steps=2) is not None, "of at most a half"
    assert collapse(lines(5, objective_clipped=lambda i: 0.48), steps=4) is None
    # Clipped advantages are no clipped ratios.
    found = lines(5, objective_clipped=lambda i: 0.95)
    for line in found:
        del line["objective/ratio"]
    assert collapse(found) is None


@pytest.mark.parametrize("known", [0, 3, 12, 30])
def test_the_alarm_keeps_what_decides(known: int, caplog: pytest.LogCaptureFixture) -> None:
    found = [{**line, "reward_worst": 0.295 if line["version"] > 35 else 0.2} for line in lines(40)]
    alarm = CollapseAlarm()
    alarm.start(found[:known])
    for line in found[known:]:
        alarm.iteration(line)
    assert [message.split(":")[0] for message in caplog.messages] == ["this run may be collapsing at version 40"]


def test_a_runs_log_watches_its_iterations_also_when_resumed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    log = RunLog(metrics)
    for i in range(20):
        log.iteration_trained(iteration_record(i))
    assert not caplog.messages
    resumed = RunLog(metrics)
    resumed.rewind(10)
    (tmp_path / "metrics.jsonl").write_text("damaged\n")  # they do not read their file again
    for one in (log, resumed):
        for _ in range(10):
            one.iteration_trained(iteration_record(75))
        (said,) = caplog.messages
        assert said.startswith("this run may be collapsing at version 76: ")
        assert "`--resume` with `--checkpoint` continues from an earlier version" in said
        caplog.clear()


def test_a_log_compares_with_no_iteration_of_other_rewards(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    broken = replace(iteration_record(3), score=Spread(mean=-2.5, best=-2.0, worst=-3.0))
    for changed in ("optimizer.learning_rate", "rewards"):
        log = RunLog(metrics := MetricsFile(tmp_path / changed))
        metrics.log("iteration", **iteration_record(0).line())
        log.rewind(1)
        log.changed(1, [Change(changed, 1, 2)])
        caplog.clear()
        for _ in range(2):
            log.iteration_trained(broken)
        assert len(caplog.messages) == (changed != "rewards")
