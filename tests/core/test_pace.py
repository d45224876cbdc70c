"""A thread goes one step ahead of its device, never two; marks measure what the device did."""

import time

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
