"""A backend whose weights differ in each process."""

import os
from dataclasses import replace
from typing import Any

from fake_backend import FakeBackend


def uneven(*_: Any) -> FakeBackend:
    """A `BackendLoader`."""
    backend = FakeBackend()
    backend.identity = replace(backend.identity, digests={"transformer": f"sha256:{os.getpid():064x}"})
    return backend
