"""Records of iterations, times of rewards, and what the trainer logs."""

import logging
from pathlib import Path

import pytest
import torch
from solrl_proto.rollouts import RewardTime
from solrl_proto.status import ScoringTime
from solrl_trainer.records.evaluations import Evaluation
from solrl_trainer.records.records import HeldOutRecord, spread_of
from solrl_trainer.records.run_log import RunLog
from solrl_trainer.records.shown_log import TRAINER_LOG, shown_log
from solrl_trainer.rollouts.device_source import RewardClock
from tests.trainer.run_folders import iteration_record


def test_the_report_of_an_iteration_and_its_spread() -> None:
    report = iteration_record(2).report(planned=30, samples=None)
    assert (report.iteration, report.version, report.explored_version, report.planned) == (2, 3, 2, 30)
    assert (report.score.mean, report.score.best) == (0.232, pytest.approx(0.274))
    assert report.rewards.keys() == {"clipscore"}
    assert report.seconds["push"] == 0.1
    assert report.scoring == iteration_record(2).scoring
    assert report.spearman is None
    assert iteration_record(0).report(planned=30, samples=None).spearman == 0.873
    # A spread separates the best half from the worst.
    found = spread_of(torch.tensor([[4.0, 3.0, 1.0], [8.0, 5.0, 3.0]]))
    assert (found.mean, found.best, found.worst) == (4.0, 6.0, 3.0)


def test_the_note_of_an_evaluation_is_of_the_images_of_the_curve(notes: list[str]) -> None:
    found = Evaluation({"clipscore": torch.tensor([[0.2, 0.8], [0.4, 0.8]])}, torch.empty(2, 3, 8, 8))
    record = HeldOutRecord.of(0, found, found, {"clipscore": 1.0}, prompts=2, seeds=1)
    RunLog().evaluated(record, found, ["a", "b"])
    assert notes == ["held out, version 0, images 2: clipscore 0.3000"]


logger = logging.getLogger("solrl_trainer.anything")


def test_lines_are_shown_and_kept_or_logged_as_a_librarys(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shown: list[str] = []
    for text in ("loading", "refused: \x1b[2J\nforged"):
        with shown_log(shown.append, tmp_path / TRAINER_LOG):
            logger.debug("not worth a line")
            logger.warning(text)
    logger.warning("after the run")
    assert shown == ["loading", r"refused: \x1b[2J\nforged"]
    kept = [line.split(" ", 3)[2:] for line in (tmp_path / TRAINER_LOG).read_text().splitlines()]
    assert kept == [["WARNING", text] for text in shown]
    caplog.clear()
    logger.warning("the emulation is slow")
    assert caplog.record_tuples == [("solrl_trainer.anything", logging.WARNING, "the emulation is slow")]


def test_times_are_summed_by_images_reward_and_place() -> None:
    clock = RewardClock()
    here, there = RewardTime(seconds=0.25), RewardTime(seconds=2.0, server="there:8200")
    clock.add("samples", "trainer", {"a": here})
    clock.add("samples", "trainer", {"a": here, "b": there})
    clock.add("samples", "service", {"a": here})
    clock.add("candidates", "service", {"a": there})
    assert clock.times == (
        ScoringTime(of="candidates", by="service", reward="a", server="there:8200", seconds=2.0),
        ScoringTime(of="samples", by="trainer", reward="a", seconds=0.5),
        ScoringTime(of="samples", by="trainer", reward="b", server="there:8200", seconds=2.0),
        ScoringTime(of="samples", by="service", reward="a", seconds=0.25),
    )
    clock.restart()
    assert clock.times == ()
