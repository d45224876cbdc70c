"""Work beside what follows it: in a thread, or on a second CUDA stream, while the first one generates."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")
Pending = Callable[[], Result]
"""Waits for the result of work that has begun, and raises its error."""


def in_background(work: Callable[[], Result], name: str) -> Pending[Result]:
    """Begin `work` in a thread of this name, for which a failed run does not wait."""
    future = Future[Result]()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future.result


class SideStream:
    """A second stream of a GPU with a thread that feeds it, one piece of work at a time. On a CPU work is done at once.

    Attributes:
        overlaps: whether work runs beside what follows it.
    """

    def __init__(self, device: torch.device) -> None:
        """`device`: of the model that generates."""
        self.overlaps = device.type == "cuda"
        self._device = device
        self._last: Future[Any] | None = None
        if self.overlaps:
            # High priority, because images are freed once they are scored.
            self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
            self._thread = ThreadPoolExecutor(1, "solrl-side-stream")

    def start(self, work: Callable[[], Result]) -> Pending[Result]:
        """Begin `work` on what the current stream computes up to now; raises the error of the previous work."""
        if not self.overlaps:
            result = work()
            return lambda: result
        if self._last is not None:
            self._last.result()
        ready = torch.cuda.current_stream(self._device).record_event()

        def run() -> Result:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                self._stream.wait_event(ready)
                result = work()
                # The tensors that `work` refers to belong to the other stream, and are free when this returns.
                self._stream.synchronize()
                return result

        future = self._thread.submit(run)
        self._last = future
        return future.result
