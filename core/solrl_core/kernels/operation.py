"""Registration of fused operations with torch, Triton if it is installed, and what kernels need of a GPU."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # torch's builds for CPUs come without it

    class _Absent:
        """Takes the place of Triton's modules where kernels are declared, and of its `jit`, but runs nothing."""

        def __getattr__(self, name: str) -> "_Absent":
            return self

        def __call__(self, function: Any) -> Any:
            return function

    HAS_TRITON = False
    triton = tl = TensorDescriptor = _Absent()
else:
    HAS_TRITON = True

__all__ = ["HAS_TRITON", "TensorDescriptor", "has_descriptors", "like_first", "operation", "tl", "triton"]


def operation(
    name: str, plain: Callable[..., R], outputs: Callable[..., Any] | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register a function that runs Triton kernels on a GPU as `solrl::{name}`; elsewhere `plain` takes its place.

    A `triton_op` lets torch.compile see the kernels. Without Triton installed it would warn at every start, so a
    `custom_op` takes its place there.

    Args:
        name: name of the operation.
        plain: `plain_{name}`, the same in torch's operations; it takes the same arguments.
        outputs: allocates the outputs without computing them. If given, torch.compile treats the function as
            opaque. The operations of `modulate` and `rope` need this: compiled as a `triton_op` they returned
            different numbers (torch 2.11), for a reason that was not found.
    """

    def register(kernel: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(kernel)
        def function(*args: P.args, **kwargs: P.kwargs) -> R:
            first: Any = args[0]
            return kernel(*args, **kwargs) if first.device.type == "cuda" else plain(*args, **kwargs)

        if outputs is None and HAS_TRITON:
            return torch.library.triton_op(f"solrl::{name}", function, mutates_args=())
        defined = torch.library.custom_op(f"solrl::{name}", function, mutates_args=())
        # Without `outputs` the function itself runs on the meta device, through its torch operations.
        defined.register_fake(outputs or function)
        return defined

    return register


def like_first(first: torch.Tensor, *_: Any) -> torch.Tensor:
    """The output of an operation that has the shape and dtype of its first input, contiguous and not computed."""
    return first.new_empty(first.shape)


def has_descriptors(device: torch.device) -> bool:
    """Whether a device is a GPU with tensor descriptors, which some kernels need: compute capability 9.0 or above."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
