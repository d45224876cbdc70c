"""Progress with an end time: its estimate, its live line and its plain lines."""

import io
import os
import pty
import re
import select
import time
from collections.abc import Callable
from datetime import datetime
from typing import TextIO

import pytest
from solrl_trainer.records import time_left
from solrl_trainer.records.progress import RichReporter
from solrl_trainer.records.time_left import Countdown, ProgressCounter, TimeLeft


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The monotonic clock, which stands; change its value to move it."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def seen(show: Callable[[TextIO], None]) -> str:
    """Text that a terminal of 80 columns is sent, without its colours."""
    main, other = pty.openpty()
    shown = b""
    with os.fdopen(other, "w") as terminal, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", "xterm-256color")
        patch.setenv("COLUMNS", "80")
        show(terminal)
        terminal.flush()
        while select.select([main], [], [], 0.2)[0]:
            shown += os.read(main, 65536)
    os.close(main)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode())


def test_the_end_follows_from_the_mean_pace(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    class Today(datetime):
        @classmethod
        def now(cls, tz: object = None) -> "Today":
            return cls(2026, 1, 1, 14, 4)

    monkeypatch.setattr(time_left, "datetime", Today)
    left = TimeLeft()
    assert left.text(0, 200) == "0 %"
    clock[0] += 30
    assert left.text(50, 200) == "25 %, ends at 14:05:30, 1 min 30 s left"
    assert left.text(50, 200, brief=True) == "25 %, ends at 14:05:30"
    assert left.text(200, 200) == "100 %, ends at 14:04:00, 0.0 s left"


def test_plain_lines_come_now_and_then(clock: list[float]) -> None:
    out = io.StringIO()
    with Countdown("calibrating", file=out) as shown:
        work = ProgressCounter(10, shown)
        for _ in range(10):
            clock[0] += 8
            work.finish(1)
    lines = out.getvalue().splitlines()
    assert [line.partition(",")[0] for line in lines] == ["calibrating: 40 %", "calibrating: 80 %"]
    assert lines[0].endswith(", 48.0 s left")


def test_a_terminal_shows_the_end_and_notes_above_it() -> None:
    def show(terminal: TextIO) -> None:
        with Countdown("evaluating", file=terminal) as shown:
            shown(0, 4)
            shown(1, 4)
            shown.print("base: [clipscore] 0.3")

    text = seen(show)
    assert re.search(r"evaluating .* 25 %, ends at \d\d:\d\d:\d\d, ", text)
    assert "base: [clipscore] 0.3" in text


def test_a_run_shows_the_end_of_its_evaluations(clock: list[float]) -> None:
    out = io.StringIO()
    with RichReporter(3, file=out) as reporter:
        reporter.phase(0, "evaluate")
        for done in range(5):
            clock[0] += 20
            reporter.progress(done, 4)
    lines = out.getvalue().splitlines()
    assert lines[0] == "evaluating held-out prompts (version 0)"
    assert [line.partition(",")[0] for line in lines[1:]] == [f"evaluating held-out prompts: {n} %" for n in (25, 75)]


def test_a_live_line_fits_80_columns_and_forgets_a_phase() -> None:
    def show(terminal: TextIO) -> None:
        with RichReporter(40, start=39, file=terminal) as reporter:
            reporter.phase(39, "evaluate")
            reporter.progress(1, 4)
            reporter.phase(39, "regenerate")

    text = seen(show)
    assert re.search(r"iteration 39 of 40 .* evaluating .* 25 %, ends at \d\d:\d\d:\d\d", text)
    assert re.search(r"iteration 40 of 40 .* regenerate .* estimating", text)


def test_a_run_shows_its_progress_within_an_iteration(clock: list[float]) -> None:
    out = io.StringIO()
    with RichReporter(3, file=out) as reporter:
        for done in (24, 48):
            reporter.counted(0, "explored", done, 48)
            clock[0] += 20
            reporter.counted(0, "regenerated", done // 2, 24)
        reporter.counted(1, "explored", 24, 48)
    assert out.getvalue().splitlines() == ["iteration 1 of 3: explored 48/48, regenerated 24/24"]


def test_a_live_line_has_the_candidates_of_its_phase_within_80_columns() -> None:
    def show(terminal: TextIO) -> None:
        with RichReporter(40, start=11, file=terminal) as reporter:
            reporter.phase(11, "explore")
            reporter.counted(11, "explored", 4608, 4608)
            reporter.phase(11, "regenerate")
            reporter.counted(11, "regenerated", 1128, 1152)
            reporter.phase(11, "regenerate")

    text = seen(show)
    assert re.search(r"iteration 12 of 40 .* regenerate 1128/1152 .* estimating", text)
