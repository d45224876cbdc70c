"""Points in a device's work, to time it and to keep a thread from running far ahead of it.

A thread only queues a GPU's work, so the thread's own clock does not measure it.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol, Self

import torch


class Mark(Protocol):
    """A point in a device's work."""

    def wait(self) -> None:
        """Return once the device has reached this point."""

    def since(self, earlier: Self) -> float:
        """Seconds of the device's work since an earlier point; wait for both first."""


class HostMark:
    """A point on a CPU, whose work is done when a call returns."""

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
        # Blocking: the waiting thread sleeps; by default CUDA polls and keeps a core busy.
        self._event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Sleep until the device has reached this point."""
        self._event.synchronize()

    def since(self, earlier: Self) -> float:
        """Seconds between the two, by the device's clock."""
        return float(earlier._event.elapsed_time(self._event)) / 1000


def mark(device: torch.device) -> Mark:
    """The point that `device` reaches once it has done all work that this thread has queued so far."""
    return CudaMark(device) if device.type == "cuda" else HostMark()


class Pace:
    """Keeps a thread one step ahead of the device: the device never waits, and cancelling loses few steps."""

    def __init__(self, here: Callable[[], Mark]) -> None:
        """`here` marks the end of the work queued so far."""
        self._here = here
        self._before: deque[Mark] = deque()

    def step(self) -> None:
        """Call before queueing a step; returns once the device has begun the previous one."""
        self._before.append(self._here())
        if len(self._before) > 1:
            self._before.popleft().wait()


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor` on `device`, without waiting for the device's earlier work."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
