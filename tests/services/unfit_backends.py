"""Backends, as `BackendLoader`, that change or end their worker process, or that note what it does."""

import contextlib
import logging
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from solrl_engine.backend import GenerationRequest
from tests.services.fake_backend import FakeBackend


def missing(*_: Any) -> FakeBackend:
    """Is not there."""
    raise OSError("there is no such model")


def sleepy(*_: Any) -> FakeBackend:
    """Takes ten minutes."""
    time.sleep(600)
    return FakeBackend()


def stopped(*_: Any) -> FakeBackend:
    """Stops its process at the first step, unless the file that the prompt names exists, which it then makes."""

    def on_step(request: GenerationRequest) -> None:
        if request.prompt.startswith("/"):
            with contextlib.suppress(FileExistsError), open(request.prompt, "x") as note:
                note.write(str(os.getpid()))
                note.flush()
                os.kill(os.getpid(), signal.SIGSTOP)

    return FakeBackend(on_step=on_step)


def lethal(*_: Any) -> FakeBackend:
    """Kills its process."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def noted(*_: Any) -> FakeBackend:
    """Notes in the file BACKENDS_NOTED when it is read and warmed up, which waits until two are read."""
    notes = Path(os.environ["BACKENDS_NOTED"])

    def note(event: str) -> None:
        with notes.open("a") as file:
            file.write(f"{event} ")

    class Noted(FakeBackend):
        def batch_sizes(self, limit: int) -> Sequence[int]:
            deadline = time.monotonic() + 300
            while notes.read_text().split().count("read") < 2:
                assert time.monotonic() < deadline, "the other does not read"
                time.sleep(0.01)
            note("warm")
            return (limit,)

    note("reading")
    time.sleep(0.3)  # the other would begin now
    logging.getLogger(__name__).warning("the weights are read")
    note("read")
    return Noted()


def paced(*_: Any) -> FakeBackend:
    """Appends a byte to the file that the prompt names at each step, of 20 ms."""

    def on_step(request: GenerationRequest) -> None:
        time.sleep(0.02)
        with contextlib.suppress(FileNotFoundError), open(request.prompt, "r+") as notes:
            notes.seek(0, os.SEEK_END)
            notes.write(".")

    return FakeBackend(on_step=on_step)
