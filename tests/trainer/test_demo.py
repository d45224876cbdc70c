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
from solrl_trainer.commands.cli import main
from solrl_trainer.commands.demo import SHAPES, WORDS, demo_config
from solrl_trainer.settings.presets import ConfigError
from tests.support.programs import Program, command
from tests.support.typed import refused


def started(folder: Path, run: Callable[..., None], *settings: str) -> Program:
    words = ("solrl-train", "demo", "--output", str(folder / "run"), *settings)
    sys.audit("solrl.fork", None, words)  # for `--unit`, like an event of subprocess
    (folder / "log").touch()
    return Program(run, (main, words, os.getcwd(), dict(os.environ)), folder / "log")


def in_a_session(*arguments: Any) -> None:
    """Run a command as a terminal does: it and its children can be interrupted at once."""
    os.setsid()
    command(*arguments)


def service_of(demo: Program) -> int:
    """Process id of the demo's service, once it is there."""
    while demo.alive:
        for child in Path(f"/proc/{demo.pid}/task/{demo.pid}/children").read_text().split():
            words = Path(f"/proc/{child}/cmdline").read_bytes()
            if b"solrl_rollout" in words and not words.startswith(b"setpriv"):
                return int(child)
        time.sleep(0.05)
    pytest.fail("the demo ended")


def ended(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a killed parent cannot take its child along")
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)], ids=["INT", "TERM", "KILL"]
)
def test_the_service_ends_with_the_demo(tmp_path: Path, number: int, code: int) -> None:
    demo = started(tmp_path, command, "--world", "shapes")
    child = service_of(demo)
    try:
        demo.send_signal(number)
        assert demo.wait(600) == code
        deadline = time.monotonic() + 600
        while not ended(child):
            assert time.monotonic() < deadline, "the service outlived the demo"
            time.sleep(0.05)
    finally:
        demo.kill()
        if not ended(child):
            os.kill(child, signal.SIGKILL)


def in_session(session: int) -> list[str]:
    """Commands of the processes of a session that run."""
    commands = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            name, _, rest = stat.read_text().rpartition(")")
            state, _, _, its = rest.split()[:4]
            if int(its) == session and state != "Z":
                commands.append(name)
    return commands


@pytest.mark.skipif(sys.platform != "linux", reason="sessions are read from /proc")
@pytest.mark.parametrize("moment", ["starting a rollout service", "untrained"])
def test_ctrl_c_leaves_no_process(tmp_path: Path, moment: str) -> None:
    """A terminal sends it to the demo and its service at once."""
    small = [f"--set={one}" for one in ("iterations=1", "explore.prompts=2", "evaluate.prompts=2")]
    demo = started(tmp_path, in_a_session, *small)
    try:
        while moment not in demo.log.read_text():
            assert demo.alive, demo.log.read_text()
            time.sleep(0.05)
        os.killpg(demo.pid, signal.SIGINT)
        # The demo may meet an error of its service, or of an import, before it is interrupted itself.
        assert demo.wait(600) in (1, 2, 130)
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


def test_without_its_packages_the_demo_says_how_to_install_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'solrl[ocr]'" in refused(main, "demo", "--output", str(tmp_path / "run"))


@pytest.mark.parametrize(
    ("changed", "cures"),
    [
        ("explore.steps=6", ["explore.fitted=null"]),
        ("guidance=2", ["explore.fitted=null", "explore.calibrated_for=null"]),
    ],
)
def test_a_change_that_the_shipped_plan_excludes_names_its_cures(changed: str, cures: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        demo_config(SHAPES, [changed])
    assert all(cure in str(raised.value) for cure in cures)
    assert len(str(raised.value)) < 300
    demo_config(SHAPES, [changed, *cures])


def test_the_words_are_explored_by_a_service_and_evaluated_after_each_iteration() -> None:
    config = demo_config(WORDS)
    assert config.uses_service
    assert (config.model, config.weights, config.explore.precision) == ("mini-text", {"ocr": 1.0}, "auto")
    assert (config.evaluate.every, config.curve_prompts, config.evaluate.prompts) == (1, 16, 128)
