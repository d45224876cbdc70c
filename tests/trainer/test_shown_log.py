"""What the trainer logs: shown as one printable line, kept in the run's folder, and a library's log otherwise."""

import logging
from pathlib import Path

import pytest
from solrl_trainer.records.shown_log import TRAINER_LOG, shown_log

logger = logging.getLogger("solrl_trainer.anything")


def test_lines_are_shown_and_kept_with_time_and_level(tmp_path: Path) -> None:
    shown: list[str] = []
    for text in ("loading", "refused: \x1b[2J\nforged"):
        with shown_log(shown.append, tmp_path / TRAINER_LOG):
            logger.debug("not worth a line")
            logger.warning(text)
    logger.warning("after the run")
    assert shown == ["loading", r"refused: \x1b[2J\nforged"]
    kept = [line.split(" ", 3)[2:] for line in (tmp_path / TRAINER_LOG).read_text().splitlines()]
    assert kept == [["WARNING", text] for text in shown]


def test_a_library_gets_a_standard_log(caplog: pytest.LogCaptureFixture) -> None:
    logger.warning("the emulation is slow")
    assert caplog.record_tuples == [("solrl_trainer.anything", logging.WARNING, "the emulation is slow")]
