"""Events in a device's work, which measure its time and limit how far a thread runs ahead of it.

A thread only queues a GPU's work, so the thread's clock does not measure that work.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Self

import torch


class DeviceEvent:
    """A point in a device's work that it reaches when it has finished all work queued by this thread so far.

    A GPU's is in the current stream. A CPU's work is done when a call returns.
    """

    def __init__(self, device: torch.device) -> None:
        self._at = time.monotonic()
        self._event: Any = None
        if device.type == "cuda":
            # Blocking: the waiting thread sleeps; by default CUDA polls and keeps a core busy.
            self._event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        """Return once the device has reached this point."""
        if self._event is not None:
            self._event.synchronize()

    def since(self, earlier: Self) -> float:
        """Seconds of the device's work since an earlier event, by its own clock; wait for both first."""
        if self._event is None:
            return self._at - earlier._at
        return float(earlier._event.elapsed_time(self._event)) / 1000


class RunAheadLimit:
    """Keeps a thread one step ahead of its device: the device never waits, and cancelling loses few steps."""

    def __init__(self, record: Callable[[], DeviceEvent]) -> None:
        """`record` records an event after the work queued so far."""
        self._record = record
        self._before: deque[DeviceEvent] = deque()

    def step(self) -> None:
        """Call before queueing a step; returns once the device has begun the previous one."""
        self._before.append(self._record())
        if len(self._before) > 1:
            self._before.popleft().wait()
