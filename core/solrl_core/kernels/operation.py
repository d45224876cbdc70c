"""Registration of fused operations with torch, and what their kernels need of a GPU."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def operation(name: str, outputs: Callable[..., Any] | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register a function that runs Triton kernels on a GPU and torch operations elsewhere, as `solrl::{name}`.

    A `triton_op` lets torch.compile see the kernels. Without Triton installed it would warn at every start, so a
    `custom_op` takes its place there.

    Args:
        name: name of the operation.
        outputs: allocates the outputs without computing them. If given, torch.compile treats the function as
            opaque. The operations of `modulate` and `rope` need this: compiled as a `triton_op` they returned
            different numbers (torch 2.11), for a reason that was not found.
    """

    def register(function: Callable[P, R]) -> Callable[P, R]:
        if outputs is None and find_spec("triton"):
            return torch.library.triton_op(f"solrl::{name}", function, mutates_args=())
        defined = torch.library.custom_op(f"solrl::{name}", function, mutates_args=())
        # Without `outputs` the function itself runs on the meta device, through its torch operations.
        defined.register_fake(outputs or function)
        return defined

    return register


def has_descriptors(device: torch.device) -> bool:
    """Whether a device is a GPU with tensor descriptors, which some kernels need: compute capability 9.0 or above."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
