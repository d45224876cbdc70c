"""Backends, as `BackendLoader`, with which worker processes cannot serve together."""

import os
import signal
import time
from dataclasses import replace
from typing import Any

from fake_backend import FakeBackend


def uneven(*_: Any) -> FakeBackend:
    """Has other weights in each process."""
    backend = FakeBackend()
    backend.identity = replace(backend.identity, digests={"transformer": f"sha256:{os.getpid():064x}"})
    return backend


def missing(*_: Any) -> FakeBackend:
    """Is not there."""
    raise OSError("there is no such model")


def sleepy(*_: Any) -> FakeBackend:
    """Takes ten minutes."""
    time.sleep(600)
    return FakeBackend()


def lethal(*_: Any) -> FakeBackend:
    """Kills its process."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError
