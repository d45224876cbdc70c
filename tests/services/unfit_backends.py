"""Backends, as `BackendLoader`, that change or end their worker process, or that note what it does."""

import logging
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.services.fake_backend import FakeBackend


def missing(*_: Any) -> FakeBackend:
    """Is not there."""
    raise OSError("there is no such model")


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
