"""Progress: plain lines, a live line in a terminal, the estimate of the end, and the table of the result."""

import io
import os
import pty
import re
import select
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from types import SimpleNamespace
from typing import TextIO

import pytest
from rich.console import Console, ConsoleRenderable
from solrl_client.retries import Wait
from solrl_trainer.policy.progress import ProgressCounter
from solrl_trainer.records import time_left
from solrl_trainer.records.progress import RichReporter, evaluation_table, result_table, rewards_table
from solrl_trainer.records.shown_log import shown_log
from solrl_trainer.records.time_left import Countdown, TimeLeft
from tests.trainer.run_folders import LONG_REWARD, RESULT, iteration_record, result_of_sum


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The monotonic clock, which stands; change its value to move it."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def seen(show: Callable[[TextIO], None], columns: int = 80) -> str:
    """Text that a terminal is sent, without its colours."""
    main, other = pty.openpty()
    shown = b""
    with os.fdopen(other, "w") as terminal, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", "xterm-256color")
        patch.setenv("COLUMNS", str(columns))
        show(terminal)
        terminal.flush()
        while select.select([main], [], [], 0.2)[0]:
            shown += os.read(main, 65536)
    os.close(main)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode())


def drive(reporter: RichReporter, iterations: int, start: int = 0) -> None:
    with reporter:
        reporter.print("comparing digests [with] http://127.0.0.1:8100")
        reporter.phase(start, "evaluate")
        for iteration in range(start, iterations):
            for name in ("explore", "regenerate", "train", "push"):
                reporter.phase(iteration, name)
            reporter.finished(iteration_record(iteration))
        reporter.phase(iterations, "evaluate")


def test_lines_are_plain_without_a_terminal() -> None:
    out = io.StringIO()
    drive(RichReporter(3, file=out), 3)
    lines = out.getvalue().splitlines()
    assert "\x1b" not in out.getvalue()
    assert "\r" not in out.getvalue()
    assert lines[0] == "comparing digests [with] http://127.0.0.1:8100"
    assert lines[1] == "evaluating held-out prompts (version 0)"
    assert " ".join(lines[2].split()) == "iteration explore wait regenerate train push proxy best worst loss"
    assert " ".join(lines[3].split()) == "1/3 4.2 s 3.5 s 1.4 s 5.0 s 0.1 s 0.2350 0.2720 0.1920 0.1100"
    assert len(lines) == 7
    out = io.StringIO()
    drive(RichReporter(30, file=out), 30, start=28)
    assert "29/30" in out.getvalue()
    assert "30/30" in out.getvalue()


WAIT = Wait("no answer (ConnectError)", waited=4.0, left=596.0)
SERVICE = "http://gpu-node:8100"


def test_a_wait_of_seconds_is_a_line_and_so_is_its_end() -> None:
    out = io.StringIO()
    with RichReporter(3, file=out) as reporter, shown_log(reporter.print):
        for wait in (replace(WAIT, waited=0.0), None, replace(WAIT, waited=0.0), WAIT, replace(WAIT, waited=9.0), None):
            reporter.waiting(SERVICE, wait)
        for wait in (WAIT, replace(WAIT, left=0.0)):  # given up, which the error says
            reporter.waiting(SERVICE, wait)
    began, ended, again = out.getvalue().splitlines()
    assert again == began
    assert re.fullmatch(rf"waiting for {SERVICE} until \d\d:\d\d:\d\d: no answer \(ConnectError\)", began)
    assert re.fullmatch(rf"waited \d+\.\d s for {SERVICE}", ended)


def test_the_live_line_says_who_is_waited_for_unless_the_run_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")

    def shown(phase: str, wait: bool) -> str:
        main, other = pty.openpty()
        with os.fdopen(other, "w") as terminal, RichReporter(40, file=terminal) as reporter:
            reporter.phase(2, "explore")
            reporter.counted(2, "explored", 96, 1152)
            reporter.phase(2, phase)
            reporter.waiting(SERVICE, replace(WAIT, waited=0.0))
            if not wait:
                reporter.waiting(SERVICE, None)
            with reporter._console.capture() as captured:
                reporter._console.print(reporter._progress.get_renderable())
        os.close(main)
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", captured.get())

    assert re.search(
        r"iteration 3 of 40 .* waiting for gpu-node:8100 \S+ until \d\d:\d\d:\d\d\s*$", shown("explore", True)
    )
    assert "explore 96/1152" in shown("explore", False)
    assert "until" not in shown("explore", False)
    assert "waiting" not in shown("train", True)


def text_of(table: ConsoleRenderable) -> str:
    console = Console(width=160, file=io.StringIO(), record=True)
    console.print(table)
    return " ".join(re.sub(r"[│╭╮╰╯─├┤╴╶━]", " ", console.export_text()).split())


def test_the_table_shows_the_result() -> None:
    text = text_of(result_table(RESULT))
    assert "made-up: mini-sana, sol_rl, trained on clipscore, 30 iterations" in text
    assert "clipscore 0.2412 0.2731 +0.0319 [+0.0281, +0.0357] trained" in text
    assert text.count("trained") == 2
    assert "narrow" not in text
    assert "strict accuracy (verifier) 48.2 % 67.3 % +19.1 points [+14.5, +23.6]" in text
    assert "126.0 105.0 42.0 150.0 3.0 61.0 385.0" in text
    assert "0.873" in text


@pytest.mark.parametrize(
    ("trained", "change", "fell"),
    [
        ({"clipscore": 1.0}, {"verifier": -0.1}, "verifier"),
        ({"clipscore": 1.0}, {"verifier": -0.1, "judge": -0.1}, "verifier and judge"),
        ({"clipscore": 1.0}, {}, None),
        ({"clipscore": 1.0}, {"clipscore": -0.1, "verifier": -0.1}, None),
        ({"clipscore": -1.0}, {"clipscore": -0.1, "verifier": -0.1}, "verifier"),
        ({"clipscore": 1.0, "verifier": 1.0}, {"weighted sum": 0.1, "verifier": -0.1}, None),
        ({"clipscore": 1.0, "verifier": 1.0}, {"weighted sum": 0.1, "verifier": -0.1, "judge": -0.1}, "judge"),
    ],
)
def test_the_table_warns_of_hacking(trained: dict[str, float], change: dict[str, float], fell: str | None) -> None:
    gains = {"clipscore": 0.1, "verifier": 0.1, "judge": 0.1} | change
    rows = {
        name: {"before": 0.5, "after": 0.5 + g, "gain": g, "low": g - 0.05, "high": g + 0.05}
        for name, g in gains.items()
    }
    text = text_of(rewards_table({"trained": trained, "prompts": 8, "rewards": rows}))
    assert ("may be hacked" in text) == (fell is not None)
    assert fell is None or f"the trained score rose, but {fell} fell: look at the images" in text


@pytest.mark.parametrize(("prompts", "over"), [(7, "7 prompts"), (1, "1 prompt"), (8, None)])
def test_the_table_names_what_was_trained_and_warns_of_few_prompts(prompts: int, over: str | None) -> None:
    result = result_of_sum(prompts)
    evaluated = result | {"version": 12, "seeds": 4}
    for table, what in ((result_table(result), "30 iterations"), (evaluation_table(evaluated), "version 12")):
        text = text_of(table)
        assert f"mini-sana, sol_rl, trained on clipscore − 0.2 × {LONG_REWARD}, {what}" in text
        assert "mini-sana/sol_rl/clipscore" not in text
        row = "0.2412 0.2731 +0.0319 [+0.0281, +0.0357] trained"
        assert f"weighted sum {row}" in text
        assert f"{LONG_REWARD} {row}, weight −0.2" in text
        assert ("may be too narrow" in text) == (over is not None)
        if over is not None:
            assert f"the intervals are over {over} and may be too narrow" in text


def test_the_end_follows_from_the_mean_pace(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_left, "datetime", SimpleNamespace(now=lambda: datetime(2026, 1, 1, 14, 4)))
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


def test_a_terminal_shows_the_end_and_notes_above_it(clock: list[float]) -> None:
    def show(terminal: TextIO) -> None:
        with Countdown("evaluating", file=terminal) as shown:
            shown(0, 4)
            clock[0] += 60
            shown(1, 4)
            shown.print("base: [clipscore] 0.3")

    text = seen(show)
    assert re.search(r"evaluating .* 25 %, ends at \d\d:\d\d:\d\d, ", text)
    assert "base: [clipscore] 0.3" in text
    assert "evaluating: " not in text


def test_a_run_shows_its_progress(clock: list[float]) -> None:
    out = io.StringIO()
    with RichReporter(3, file=out) as reporter:
        reporter.phase(0, "evaluate")
        for done in range(5):
            clock[0] += 20
            reporter.progress(done, 4)
    lines = out.getvalue().splitlines()
    assert lines[0] == "evaluating held-out prompts (version 0)"
    assert [line.partition(",")[0] for line in lines[1:]] == [f"evaluating held-out prompts: {n} %" for n in (25, 75)]
    out = io.StringIO()
    with RichReporter(3, file=out) as reporter:
        for done in (24, 48):
            reporter.counted(0, "explored", done, 48)
            clock[0] += 20
            reporter.counted(0, "regenerated", done // 2, 24)
        reporter.counted(1, "explored", 24, 48)
    assert out.getvalue().splitlines() == ["iteration 1 of 3: explored 48/48, regenerated 24/24"]


def test_a_live_line_fits_80_columns_has_the_candidates_of_its_phase_and_forgets_a_phase() -> None:
    def show(terminal: TextIO) -> None:
        with RichReporter(40, file=terminal) as reporter:
            reporter.phase(38, "explore")
            reporter.counted(38, "explored", 4608, 4608)
            reporter.phase(38, "regenerate")
            reporter.counted(38, "regenerated", 1128, 1152)
            reporter.phase(39, "evaluate")
            reporter.progress(1, 4)
            reporter.phase(39, "regenerate")

    text = seen(lambda terminal: drive(RichReporter(3, file=terminal), 3), columns=120)
    assert "iteration 2 of 3" in text
    assert re.search(r"\d s left", text)
    text = seen(show)
    assert re.search(r"iteration 39 of 40 .* regenerate 1128/1152 .* estimating", text)
    assert re.search(r"iteration 39 of 40 .* evaluating .* 25 %, ends at \d\d:\d\d:\d\d", text)
    assert re.search(r"iteration 40 of 40 .* regenerate .* estimating", text)
