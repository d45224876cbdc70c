"""State of the process and of its thread that results depend on, and that is put back after a reward."""

import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

RANDOM_NUMBERS = ("torch's random numbers", "numpy's random numbers", "Python's random numbers")
"""Names of the states that also a mere draw changes."""


class _State(NamedTuple):
    name: str
    get: Callable[[], Any]
    put: Callable[[Any], object]


def _attribute(owner: Any, path: str) -> _State:
    *parts, last = path.split(".")
    for part in parts:
        owner = getattr(owner, part)
    return _State(f"torch.backends.{path}", lambda: _legible(lambda: getattr(owner, last)), _putter(owner, last))


def _putter(owner: Any, name: str) -> Callable[[Any], None]:
    return lambda value: setattr(owner, name, value)


def _legible(get: Callable[[], Any]) -> Any:
    """A state; None where it cannot be told: two interfaces of torch were mixed, or the working directory is gone."""
    try:
        return get()
    except (RuntimeError, OSError):
        return None


def _torch_draws() -> tuple[bytes, ...]:
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return tuple(state.numpy().tobytes() for state in (torch.get_rng_state(), *devices))


def _put_torch_draws(states: tuple[bytes, ...]) -> None:
    first, *devices = (torch.frombuffer(bytearray(state), dtype=torch.uint8) for state in states)
    torch.set_rng_state(first)
    for index, state in enumerate(devices):
        torch.cuda.set_rng_state(state, index)


def _numpy_draws() -> tuple[Any, ...]:
    name, keys, *others = np.random.get_state()
    return name, np.asarray(keys).tobytes(), *others


def _put_numpy_draws(state: tuple[Any, ...]) -> None:
    name, keys, *others = state
    np.random.set_state((name, np.frombuffer(keys, np.uint32), *others))


def _put_default_device(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)  # the CPU is what it is by itself


_STATES = (
    _State("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
    _State("the default device", torch.get_default_device, _put_default_device),
    *(
        _State(name, get, put)
        for device in ("cpu", "cuda")
        for name, get, put in (
            (
                f"autocast on {device}",
                lambda device=device: torch.is_autocast_enabled(device),
                lambda value, device=device: torch.set_autocast_enabled(device, value),
            ),
            (
                f"autocast's dtype on {device}",
                lambda device=device: torch.get_autocast_dtype(device),
                lambda value, device=device: torch.set_autocast_dtype(device, value),
            ),
        )
    ),
    _State(
        "the float32 matmul precision",
        lambda: _legible(torch.get_float32_matmul_precision),
        torch.set_float32_matmul_precision,
    ),
    # The older interface first: it writes to the newer one, too.
    _attribute(torch.backends, "cudnn.allow_tf32"),
    _attribute(torch.backends, "fp32_precision"),
    _attribute(torch.backends, "cuda.matmul.fp32_precision"),
    _attribute(torch.backends, "cudnn.conv.fp32_precision"),
    _attribute(torch.backends, "cudnn.rnn.fp32_precision"),
    _attribute(torch.backends, "mkldnn.matmul.fp32_precision"),
    _attribute(torch.backends, "mkldnn.conv.fp32_precision"),
    _attribute(torch.backends, "cuda.matmul.allow_fp16_reduced_precision_reduction"),
    _attribute(torch.backends, "cuda.matmul.allow_bf16_reduced_precision_reduction"),
    _attribute(torch.backends, "cudnn.enabled"),
    _attribute(torch.backends, "cudnn.benchmark"),
    _attribute(torch.backends, "cudnn.deterministic"),
    _State(
        "deterministic algorithms",
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    _State("torch's number of threads", torch.get_num_threads, torch.set_num_threads),
    _State("numpy's handling of errors", np.geterr, lambda value: np.seterr(**value)),
    _State("the working directory", lambda: _legible(os.getcwd), os.chdir),
    _State(RANDOM_NUMBERS[0], _torch_draws, _put_torch_draws),
    _State(RANDOM_NUMBERS[1], _numpy_draws, _put_numpy_draws),
    _State(RANDOM_NUMBERS[2], random.getstate, random.setstate),
)


@contextmanager
def put_back(on_changed: Callable[[Sequence[str]], object]) -> Iterator[None]:
    """Run what may change the state of the process and of this thread, and put that back.

    `on_changed` is then called with the names of what had been changed, if anything was.
    """
    gradients, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    before = [state.get() for state in _STATES]
    changed: list[str] = []
    try:
        # At their end, these put back what they found, whatever is set by then.
        with torch.inference_mode(inference), torch.set_grad_enabled(gradients):
            try:
                yield
            finally:
                if (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) != (gradients, inference):
                    changed.append("whether gradients are computed")
                changed += [state.name for state, was in zip(_STATES, before, strict=True) if state.get() != was]
    finally:
        if changed:
            # All settings, since some write to other settings.
            for state, was in zip(_STATES, before, strict=True):
                if was is not None:
                    state.put(was)
            on_changed(changed)
