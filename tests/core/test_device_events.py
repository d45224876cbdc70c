"""A thread runs at most one step ahead of its device; events measure the device's time."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from solrl_core.devices import upload
from solrl_core.sampling.device_events import DeviceEvent, RunAheadLimit


def test_a_thread_is_at_most_one_step_ahead() -> None:
    launched, reached = 0, list[int]()

    def record() -> Any:
        """An event behind the steps that are launched now."""
        return SimpleNamespace(wait=partial(reached.append, launched))

    run_ahead = RunAheadLimit(record)
    for step in range(6):
        run_ahead.step()
        # All launched steps but the last have finished before the next is launched.
        assert max(reached, default=0) == max(0, step - 1)
        launched += 1
    assert reached == sorted(reached)


_LONG = 10**9  # cycles: about half a second


def busy() -> bool:
    """Whether the GPU still has work to do."""
    return not torch.cuda.current_stream().query()


@pytest.mark.gpu
def test_on_a_gpu_events_wait_for_their_work_and_uploads_do_not() -> None:
    device = torch.device("cuda")
    first = DeviceEvent(device)
    torch.cuda._sleep(_LONG)
    second = DeviceEvent(device)
    assert busy()
    second.wait()
    assert not busy()
    assert second.since(first) > 0.1
    values = torch.randn(1000, 1000)
    upload(values, torch.device("cuda")).cpu()  # the first upload allocates pinned memory, which does wait
    torch.cuda._sleep(_LONG)
    there = upload(values, torch.device("cuda"))
    assert busy()
    assert torch.equal(there.cpu(), values)


@pytest.mark.gpu
def test_on_a_gpu_the_thread_waits_for_all_steps_but_the_last() -> None:
    run_ahead = RunAheadLimit(lambda: DeviceEvent(torch.device("cuda")))
    ends = [torch.cuda.Event() for _ in range(4)]  # type: ignore[no-untyped-call]
    for end in ends:
        run_ahead.step()
        torch.cuda._sleep(_LONG)
        end.record()
    assert [end.query() for end in ends[:2]] == [True, True]
    assert busy()  # the third or the fourth step is running
