"""Pace: a thread runs at most one step ahead of its device. Marks measure the device's time."""

import time

import pytest
import torch
from solrl_core.pace import Pace, mark, upload


class Device:
    """Records launches and waits."""

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
    began = time.monotonic()
    first = mark(torch.device("cpu"))
    time.sleep(0.02)
    second = mark(torch.device("cpu"))
    second.wait()
    assert 0.02 <= second.since(first) <= time.monotonic() - began


def test_an_upload_changes_nothing() -> None:
    values = torch.randn(3, 4)
    assert torch.equal(upload(values, torch.device("cpu")), values)


on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
_LONG = 10**9  # cycles: some half of a second


def busy() -> bool:
    """Whether the GPU still has work to do."""
    return not torch.cuda.current_stream().query()


@on_gpu
def test_on_a_gpu_a_mark_is_reached_when_the_work_before_it_is_done() -> None:
    device = torch.device("cuda")
    first = mark(device)
    torch.cuda._sleep(_LONG)
    second = mark(device)
    assert busy()
    second.wait()
    assert not busy()
    assert second.since(first) > 0.1


@on_gpu
def test_on_a_gpu_an_upload_does_not_wait_and_is_whole() -> None:
    values = torch.randn(1000, 1000)
    upload(values, torch.device("cuda")).cpu()  # pinned memory is taken once, and that does wait
    torch.cuda._sleep(_LONG)
    there = upload(values, torch.device("cuda"))
    assert busy()
    assert torch.equal(there.cpu(), values)


@on_gpu
def test_on_a_gpu_the_thread_waits_for_all_steps_but_the_last() -> None:
    pace = Pace(lambda: mark(torch.device("cuda")))
    ends = [torch.cuda.Event() for _ in range(4)]  # type: ignore[no-untyped-call]
    for end in ends:
        pace.step()
        torch.cuda._sleep(_LONG)
        end.record()
    assert [end.query() for end in ends[:2]] == [True, True]
    assert busy()  # with the third or the fourth
