"""One call of a reward: what it gets is its own, what it returns is checked and copied, what it changes is put back."""

import copy
import os
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch

from solrl_core.errors import RewardError

Called = Callable[[torch.Tensor, Sequence[str], Sequence[Mapping[str, Any]]], torch.Tensor]


@contextmanager
def state_put_back() -> Iterator[None]:
    """Put back, after a reward's code, the states that `Reward` lists."""
    numpy_state, python_state, folder = np.random.get_state(), random.getstate(), ""
    with suppress(OSError):  # the folder may be gone
        folder = os.getcwd()
    dtype, threads, device = torch.get_default_dtype(), torch.get_num_threads(), torch.get_default_device()
    is_initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = range(torch.cuda.device_count()) if is_initialized else ()
    try:
        with torch.random.fork_rng(devices), torch.set_grad_enabled(torch.is_grad_enabled()):
            yield
    finally:
        torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:
            torch.set_default_device(None if device.type == "cpu" else device)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        np.random.set_state(numpy_state)
        random.setstate(python_state)
        with suppress(OSError):
            os.chdir(folder)


@contextmanager
def calling() -> Iterator[None]:
    """Call a reward within: without gradients, so that scores do not retain its activations."""
    with state_put_back(), torch.no_grad():
        yield


def copies(
    images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
) -> tuple[torch.Tensor, list[str], list[Mapping[str, Any]]]:
    """Copies of a reward's arguments; the reward may write to them."""
    return images.clone(), list(prompts), copy.deepcopy(list(metadata))


def first_failing(
    reward: Called, images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Mapping[str, Any]]
) -> int | None:
    """Index of the first image that also fails by itself; None if only the whole batch fails."""
    for index in range(len(images)):
        row = slice(index, index + 1)
        try:
            with calling():
                reward(*copies(images[row], prompts[row], metadata[row]))
        except BaseException as error:
            if is_interrupt(error):
                raise
            return index
    return None


def is_interrupt(error: BaseException) -> bool:
    """Whether an error is the user's Ctrl-C, which only the main thread gets, and no fault of a reward."""
    return isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


def checked_scores(name: str, scores: Any, prompts: Sequence[str]) -> torch.Tensor:
    """A copy of a reward's scores as float32 on the CPU; RewardError unless it is a finite number for each prompt."""
    shape = (len(prompts),)
    expected = f"expected a tensor of shape {shape}"
    if not isinstance(scores, torch.Tensor):
        size = f" of {len(scores)}" if isinstance(scores, Sized) else ""
        kind = "None" if scores is None else f"a value of type {type(scores).__name__}{size}"
        raise RewardError(name, f"gave {kind}; {expected}, such as torch.tensor(scores)")
    if scores.is_complex():
        raise RewardError(name, f"gave complex numbers ({scores.dtype}); {expected} of real numbers")
    if scores.shape != shape:
        raise RewardError(name, f"gave shape {tuple(scores.shape)}; expected {shape}")
    values = scores.detach().to("cpu", torch.float32, copy=True)
    bad = (~torch.isfinite(values)).nonzero()
    if len(bad):
        index = int(bad[0])
        raise RewardError(name, f"gave {values[index]} for image {index} of prompt {prompts[index]!r}")
    return values
