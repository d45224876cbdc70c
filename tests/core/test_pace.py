"""A thread goes one step ahead of its device, never two; marks measure what the device did."""

import time

import pytest
import torch
from solrl_core.pace import Pace, mark, upload


class Device:
    """Notes what is asked of it and what is waited for."""

    def __init__(self) -> None:
        self.asked = 0
        self.reached: list[int] = []

    def here(self) -> "At":
        return At(self, self.asked)


class At:
    def __init__(self, device: Device, at: int) -> None:
        self._device, self._at = device, at

    def wait(self) -> None:
        self._device.reached.append(self._at)

    def since(self, earlier: "At") -> float:
        return float(self._at - earlier._at)


def test_a_thread_is_at_most_one_step_ahead() -> None:
    device = Device()
    pace = Pace(device.here)
    for step in range(6):
        pace.step()
        # All but the last step that was asked for is done when the next one is.
        assert max(device.reached, default=0) == max(0, step - 1)
        device.asked += 1
    assert device.reached == sorted(device.reached)


def test_a_mark_on_a_cpu_is_the_clock() -> None:
    first = mark(torch.device("cpu"))
    time.sleep(0.02)
    second = mark(torch.device("cpu"))
    second.wait()
    assert 0.02 <= second.since(first) < 2


def test_an_upload_changes_nothing() -> None:
    values = torch.randn(3, 4)
    assert torch.equal(upload(values, torch.device("cpu")), values)


on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
_LONG = 10**9  # cycles: some half of a second


@on_gpu
def test_on_a_gpu_a_mark_is_reached_when_the_work_before_it_is_done() -> None:
    device = torch.device("cuda")
    first = mark(device)
    torch.cuda._sleep(_LONG)
    began = time.monotonic()
    second = mark(device)
    assert time.monotonic() - began < 0.1
    second.wait()
    assert 0.1 < second.since(first) < 2


@on_gpu
def test_on_a_gpu_an_upload_does_not_wait_and_is_whole() -> None:
    values = torch.randn(1000, 1000)
    upload(values, torch.device("cuda")).cpu()  # pinned memory is taken once, and that does wait
    torch.cuda._sleep(_LONG)
    began = time.monotonic()
    there = upload(values, torch.device("cuda"))
    assert time.monotonic() - began < 0.1
    assert torch.equal(there.cpu(), values)


@on_gpu
def test_on_a_gpu_the_thread_waits_for_all_steps_but_the_last() -> None:
    device = torch.device("cuda")
    pace = Pace(lambda: mark(device))
    for _ in range(4):
        pace.step()
        torch.cuda._sleep(_LONG)
    last = mark(device)
    began = time.monotonic()
    last.wait()
    left = time.monotonic() - began
    assert 0.1 < left < 2  # two steps were still to be done, the third and the fourth
