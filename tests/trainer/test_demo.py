"""The demo's settings are checked first, and its service never outlives it."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from fault_trials.child import command
from fault_trials.processes import Program
from solrl_trainer.commands.cli import main
from solrl_trainer.commands.demo import demo_config
from solrl_trainer.settings.presets import ConfigError
from typed import refused


def service_of(demo: Program) -> int:
    """Process id of the demo's service, once it runs."""
    while demo.alive:
        children = Path(f"/proc/{demo.pid}/task/{demo.pid}/children").read_text().split()
        for child in children:
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
            if b"solrl_rollout" in words and not words[0].endswith(b"setpriv"):
                return int(child)
        time.sleep(0.05)
    pytest.fail("the demo ended")


def ended(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a killed parent cannot take its child along")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)], ids=["TERM", "KILL"])
def test_the_service_ends_with_the_demo(tmp_path: Path, number: int, code: int) -> None:
    words = ("solrl-train", "demo", "--output", str(tmp_path / "run"))
    sys.audit("solrl.fork", None, words)  # for `--unit`, like an event of subprocess
    demo = Program(command, (main, words, os.getcwd(), dict(os.environ)), tmp_path / "log")
    service = service_of(demo)
    try:
        demo.send_signal(number)
        assert demo.wait(600) == code
        deadline = time.monotonic() + 600
        while not ended(service):
            assert time.monotonic() < deadline, "the service outlived the demo"
            time.sleep(0.05)
    finally:
        demo.kill()
        if not ended(service):
            os.kill(service, signal.SIGKILL)


@pytest.mark.parametrize("setting", ["TYPO=1", "explore.prompts=many"])
def test_an_invalid_setting_is_refused_before_anything_is_deleted_or_started(tmp_path: Path, setting: str) -> None:
    earlier = tmp_path / "metrics.jsonl"
    earlier.write_text("")
    assert setting.partition("=")[0] in refused(main, "demo", "--output", str(tmp_path), "--set", setting)
    assert list(tmp_path.iterdir()) == [earlier]


@pytest.mark.parametrize(
    ("changed", "cures"),
    [
        ("explore.steps=6", ["explore.fitted=null"]),
        ("guidance=2", ["explore.fitted=null", "explore.calibrated_for=null"]),
    ],
)
def test_a_change_that_the_shipped_plan_excludes_names_its_cures(changed: str, cures: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        demo_config([changed])
    assert all(cure in str(raised.value) for cure in cures)
    assert len(str(raised.value)) < 300
    demo_config([changed, *cures])
