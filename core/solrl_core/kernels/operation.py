"""How an operation with a kernel of its own is registered with torch."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def operation(name: str, outputs: Callable[..., Any] | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register a function that calls Triton kernels on a GPU, and torch's operations elsewhere, as `solrl::{name}`.

    torch then sees the kernels when it compiles. Where there is no Triton it would warn of that at every start.

    Args:
        name: the operation's.
        outputs: makes the outputs without computing them; then torch does not look into the function. What it saw
            into, of `modulate`'s, computed other numbers once it was compiled (torch 2.11); why was not found.
    """

    def register(function: Callable[P, R]) -> Callable[P, R]:
        if outputs is None and find_spec("triton"):
            return torch.library.triton_op(f"solrl::{name}", function, mutates_args=())
        defined = torch.library.custom_op(f"solrl::{name}", function, mutates_args=())
        # Without `outputs` it is its torch operations on the meta device, too.
        defined.register_fake(outputs or function)
        return defined

    return register
