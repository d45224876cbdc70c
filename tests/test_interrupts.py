"""Ctrl-C while the programs import, load and work: one line, and exit status 130."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from solrl_trainer.__main__ import main

from tests.support.programs import Program, command
from tests.trainer.training_helpers import TINY

PROGRAMS = Path(sys.executable).parent
Moment = Callable[[int, Path], bool]


def starting(pid: int, output: Path) -> bool:
    """The package is being imported; the interpreter's own start comes before anything that a program can answer."""
    return "pydantic_core" in maps(pid)


def loading(pid: int, output: Path) -> bool:
    return "loading mini-sana" in output.read_text() or ".safetensors" in maps(pid)


def maps(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def interrupted(tmp_path: Path, moment: Moment, program: str, *words: str) -> tuple[int, list[str]]:
    """Exit status and output of a program that gets SIGINT at a moment."""
    output = tmp_path / "output"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with output.open("wb") as file:
        process = subprocess.Popen([PROGRAMS / program, *words], stdout=file, stderr=subprocess.STDOUT, env=environment)
    try:
        while process.poll() is None and not moment(process.pid, output):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        return process.wait(600), output.read_text().splitlines()
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("moment", [starting, pytest.param(loading, marks=pytest.mark.release)])
def test_a_service_that_loads(tmp_path: Path, moment: Moment) -> None:
    found = interrupted(tmp_path, moment, "solrl-rollout", "serve", "--model", "mini-sana", "--port", "0")
    assert found == (130, ["solrl-rollout: stopped"])


def training(tmp_path: Path) -> list[str]:
    preset, settings = "mini-sana/naive_scaling/clipscore", [word for one in TINY for word in ("--set", one)]
    return ["solrl-train", "run", "--preset", preset, *settings, "--output", str(tmp_path / "run")]


@pytest.mark.slow
def test_a_trainer_that_evaluates(tmp_path: Path) -> None:
    log = tmp_path / "output"
    process = Program(command, (main, training(tmp_path), str(tmp_path), dict(os.environ)), log)
    while process.alive and not (log.exists() and "evaluating" in log.read_text()):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    (said,) = [line for line in log.read_text().splitlines() if not line.startswith(("loading ", "evaluating "))]
    assert said.startswith("solrl-train: stopped; continue with: ")
    assert said.endswith(f"solrl-train run --resume {tmp_path / 'run'}")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143)], ids=["INT", "TERM"]
)
def test_a_signal_within_an_import_unwinds_after_it(tmp_path: Path, number: int, code: int) -> None:
    (tmp_path / "swallows.py").write_text(
        "import sys, time\n"
        "print('importing', flush=True)\n"
        "try:\n    sys.stdin.read()\n    time.sleep(0.2)\nexcept BaseException:\n    print('swallowed', flush=True)\n"
        "print('imported', flush=True)\n"
    )
    program = (
        "import signal, threading\n"
        "from solrl_core.interrupts import unwinding\n"
        "with unwinding(signal.SIGINT, signal.SIGTERM):\n"
        "    try:\n        import swallows\n        threading.Event().wait(30)\n"
        "    finally:\n        print('cleaned up', flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(number)
        process.stdin.close()
        assert process.stdout.read().splitlines() == ["imported", "cleaned up"]
        assert process.wait(600) == code
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
