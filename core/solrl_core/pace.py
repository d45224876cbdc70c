"""Points in a device's work: what went on between two of them, and how far a thread may run ahead of it.

A GPU's work is only queued by the thread that asks for it, so the thread's own clock says nothing about it.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol, Self

import torch


class Mark(Protocol):
    """A point in a device's work."""

    def wait(self) -> None:
        """Return once the device has come this far."""

    def since(self, earlier: Self) -> float:
        """Seconds that the device took from an earlier point to this one; both must have been waited for."""


class HostMark:
    """For a CPU, which has done what it was asked for when the call returns."""

    def __init__(self) -> None:
        self._at = time.monotonic()

    def wait(self) -> None:
        """Return at once."""

    def since(self, earlier: Self) -> float:
        """Seconds between the two."""
        return self._at - earlier._at


class CudaMark:
    """An event in the current stream of `device`."""

    def __init__(self, device: torch.device) -> None:
        # Blocking: whoever waits sleeps, where CUDA would otherwise keep a core busy by asking.
        self._event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Sleep until the device has come this far."""
        self._event.synchronize()

    def since(self, earlier: Self) -> float:
        """Seconds between the two, by the device's clock."""
        return float(earlier._event.elapsed_time(self._event)) / 1000


def mark(device: torch.device) -> Mark:
    """The point that `device` reaches when all is done that this thread has asked of it so far."""
    return CudaMark(device) if device.type == "cuda" else HostMark()


class Pace:
    """Keeps a thread one step ahead of the device: enough for it never to wait, and few steps are left to cancel."""

    def __init__(self, here: Callable[[], Mark]) -> None:
        """`here` marks the point that the device has been asked to come to."""
        self._here = here
        self._before: deque[Mark] = deque()

    def step(self) -> None:
        """Call before each step is asked for; returns once the device has begun the one before it."""
        self._before.append(self._here())
        if len(self._before) > 1:
            self._before.popleft().wait()


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor` on `device`, without waiting for what was asked of the device before."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
