"""Ctrl-C while the programs import, load and work: one line, and exit status 130."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from training_helpers import TINY

PROGRAMS = Path(sys.executable).parent
Moment = Callable[[int, Path], bool]


def starting(pid: int, output: Path) -> bool:
    """The package is being imported; the interpreter's own start comes before anything that a program can answer."""
    return "pydantic_core" in maps(pid)


def importing(pid: int, output: Path) -> bool:
    """torch is being imported, which has swallowed KeyboardInterrupt."""
    return "libtorch_cpu" in maps(pid)


def loading(pid: int, output: Path) -> bool:
    return "loading mini-sana" in output.read_text() or ".safetensors" in maps(pid)


def evaluating(pid: int, output: Path) -> bool:
    return "evaluating" in output.read_text()


def maps(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def interrupted(tmp_path: Path, moment: Moment, *command: str) -> tuple[int, list[str]]:
    """Exit status and output of a program that gets SIGINT at a moment."""
    output = tmp_path / "output"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with output.open("wb") as file:
        process = subprocess.Popen(
            [PROGRAMS / command[0], *command[1:]], stdout=file, stderr=subprocess.STDOUT, env=environment
        )
    try:
        while process.poll() is None and not moment(process.pid, output):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        return process.wait(600), output.read_text().splitlines()
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("moment", [starting, importing, loading])
def test_a_service_that_loads(tmp_path: Path, moment: Moment) -> None:
    found = interrupted(tmp_path, moment, "solrl-rollout", "serve", "--model", "mini-sana", "--port", "0")
    assert found == (130, ["solrl-rollout: stopped"])


@pytest.mark.slow
@pytest.mark.parametrize("moment", [starting, importing, loading, evaluating])
def test_a_trainer(tmp_path: Path, moment: Moment) -> None:
    preset, settings = "mini-sana/naive_scaling/clipscore", [word for one in TINY for word in ("--set", one)]
    command = ("solrl-train", "run", "--preset", preset, *settings, "--output", str(tmp_path / "run"))
    code, lines = interrupted(tmp_path, moment, *command)
    assert code == 130
    said = [line for line in lines if not line.startswith(("loading ", "evaluating "))]
    assert len(said) == 1
    assert said[0].startswith("solrl-train: stopped")
    if moment is evaluating:
        assert said == [f"solrl-train: stopped; continue with: solrl-train run --resume {tmp_path / 'run'}"]
