"""The demo's settings are checked first, and its processes never outlive it."""

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from solrl_trainer.__main__ import main
from solrl_trainer.commands.demo import demo_config
from tests.support.programs import Program, command
from tests.support.typed import refused


def in_a_session(*arguments: Any) -> None:
    """Run a command as a terminal does: it and its children can be interrupted at once."""
    os.setsid()
    command(*arguments)


def in_session(session: int) -> list[str]:
    """Commands of the processes of a session that run, their words separated by zeros."""
    commands = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, _, its = stat.read_text().rpartition(")")[2].split()[:4]
            if int(its) == session and state != "Z":
                commands.append(stat.with_name("cmdline").read_text())
    return commands


def serves(session: int) -> bool:
    """Whether the service of a demo is there, which setpriv has bound to it."""
    words = [command for command in in_session(session) if not command.startswith("setpriv")]
    return any("\0solrl_rollout\0serve\0" in command for command in words)


# A demo that Ctrl-C interrupts may meet an error of its service, or of an import, before it is interrupted itself.
@pytest.mark.skipif(sys.platform != "linux", reason="sessions are read from /proc")
@pytest.mark.parametrize(
    ("send", "number", "moment", "codes"),
    [
        (os.kill, signal.SIGINT, "", (130,)),
        (os.kill, signal.SIGTERM, "", (143,)),
        (os.kill, signal.SIGKILL, "", (-9,)),
        (os.killpg, signal.SIGINT, "starting a rollout service", (1, 2, 130)),
        (os.killpg, signal.SIGINT, "untrained", (1, 2, 130)),
    ],
    ids=["INT", "TERM", "KILL", "Ctrl-C at the start", "Ctrl-C in the run"],
)
def test_no_process_outlives_the_demo(
    tmp_path: Path, send: Callable[[int, int], None], number: int, moment: str, codes: tuple[int, ...]
) -> None:
    small = [f"--set={one}" for one in ("iterations=1", "explore.prompts=2", "evaluate.prompts=2")]
    words = ("solrl-train", "demo", "--output", str(tmp_path / "run"), *small)
    sys.audit("solrl.fork", None, words)  # for `--unit`, like an event of subprocess
    (tmp_path / "log").touch()
    demo = Program(in_a_session, (main, words, os.getcwd(), dict(os.environ)), tmp_path / "log")
    try:
        while not (moment in demo.log.read_text() if moment else serves(demo.pid)):
            assert demo.alive, demo.log.read_text()
            time.sleep(0.05)
        send(demo.pid, number)
        assert demo.wait(600) in codes
        deadline = time.monotonic() + 600
        while left := in_session(demo.pid):
            assert time.monotonic() < deadline, left
            time.sleep(0.05)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(demo.pid, signal.SIGKILL)


@pytest.mark.parametrize("setting", ["TYPO=1", "explore.prompts=many"])
def test_an_invalid_setting_is_refused_before_anything_is_started(tmp_path: Path, setting: str) -> None:
    output = tmp_path / "run"
    assert setting.partition("=")[0] in refused(main, "demo", "--output", str(output), "--set", setting)
    assert not output.exists()


@pytest.mark.parametrize(("files", "said"), [((), "not finished"), (("report.html",), "report.html")])
def test_a_second_demo_says_what_to_do_and_keeps_the_first(tmp_path: Path, files: tuple[str, ...], said: str) -> None:
    for name in ("config.json", *files):
        (tmp_path / name).write_text("{}")
    text = refused(main, "demo", "--output", str(tmp_path))
    assert said in text
    assert f"rm -r {tmp_path}" in text
    assert "--output FOLDER" in text
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", ".lock", *files}


def test_without_packages_the_demo_says_how_to_install_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'solrl[ocr]'" in refused(main, "demo", "--output", str(tmp_path / "run"))


def test_the_words_are_explored_by_a_service_and_evaluated_after_each_iteration() -> None:
    config = demo_config()
    assert config.uses_service
    assert (config.model, config.weights, config.explore.precision) == ("mini-text", {"ocr": 1.0}, "auto")
    assert (config.evaluate.every, config.curve_prompts, config.evaluate.prompts) == (1, 16, 128)
