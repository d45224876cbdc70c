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
    register = torch.library.triton_op if find_spec("triton") else torch.library.custom_op
    return register(f"solrl::{name}", mutates_args=())
