"""Third-party rewards with faults, loaded by the real service as `faulty_rewards:<name>`."""

import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch


def picky(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """Needs metadata `want`."""
    return torch.tensor([float(one["want"]) for one in metadata])


def fatal(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """Kills the thread that calls it."""
    sys.exit("the end")


def lethal(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """Kills the process if the metadata says `kill`."""
    if any(one.get("kill") for one in metadata):
        os.kill(os.getpid(), signal.SIGKILL)
    return images.mean((1, 2, 3))


gate = threading.Event()
"""Event for which `gated` waits."""


def gated(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """Waits for `gate`; then behaves like `picky`."""
    assert gate.wait(600)
    return picky(images, prompts, metadata)
