"""Work in a thread, and on a GPU on a second CUDA stream, while the caller generates."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from solrl_core.sampling.device_events import DeviceEvent

Result = TypeVar("Result")
Pending = Callable[[], Result]
"""Waits for the result of work that has begun, and raises its error."""


def in_thread(work: Callable[[], Result], name: str) -> Future[Result]:
    """Begin `work` in a thread of this name. The program may end before it returns."""
    future = Future[Result]()
    works = [work]

    def run() -> None:
        try:
            result = works.pop()()  # the work, with the tensors it refers to, is gone once it has returned
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class SideStream:
    """A second stream of a GPU with a thread that feeds it, one piece of work at a time.

    Without `overlaps`, work is done at once.

    Attributes:
        overlaps: whether work runs beside what follows it.
    """

    def __init__(
        self, device: torch.device, *, overlaps: bool | None = None, on_end: Callable[[], None] = lambda: None
    ) -> None:
        """Set up the thread.

        Args:
            device: device of the model that generates.
            overlaps: whether work runs in the thread; None on a GPU only.
            on_end: called on the thread whenever work has ended.
        """
        self.overlaps = device.type == "cuda" if overlaps is None else overlaps
        self._device = device
        self._last: Future[Any] | None = None
        self._on_end = on_end
        # High priority, because a chunk's memory is free once it is scored.
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device, priority=-1) if on_gpu else None  # type: ignore[no-untyped-call]
        self._thread = ThreadPoolExecutor(1, "solrl-scoring") if self.overlaps else None

    def start(self, work: Callable[[], Result]) -> Pending[Result]:
        """Begin `work` on what the current stream computes up to now; raises the error of the previous work."""
        self.wait()
        ready = DeviceEvent(self._device)

        def run() -> Result:
            ready.wait()
            # The tensors that `work` refers to belong to the other stream, and are free when this returns.
            with torch.cuda.stream(self._stream):
                result = work()
                if self._stream is not None:
                    self._stream.synchronize()
                return result

        if self._thread is None:
            result = run()
            return lambda: result
        future = self._last = self._thread.submit(run)
        future.add_done_callback(lambda _: self._on_end())
        return future.result

    @property
    def idle(self) -> bool:
        return self._last is None or self._last.done()

    def check(self) -> None:
        """Raise the error of the last work, if it has ended with one."""
        if self.idle:
            self.wait()

    def wait(self) -> None:
        """Wait for the last work; raises its error."""
        if self._last is not None:
            self._last.result()

    def close(self) -> None:
        """Wait for all work and end the thread."""
        if self._thread is not None:
            self._thread.shutdown()
