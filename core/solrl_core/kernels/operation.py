"""How an operation with a kernel of its own is registered with torch."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def operation(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register a function that calls Triton kernels on a GPU, and torch's operations elsewhere, as `solrl::{name}`.

    torch then sees the kernels when it compiles. Where there is no Triton it would warn of that at every start.
    """

    def register(function: Callable[P, R]) -> Callable[P, R]:
        if find_spec("triton"):
            return torch.library.triton_op(f"solrl::{name}", function, mutates_args=())
        defined = torch.library.custom_op(f"solrl::{name}", function, mutates_args=())
        # On the meta device, too, it is its torch operations.
        defined.register_fake(function)
        return defined

    return register
