"""Layers that see only the prompt, computed once for a batch instead of in each of its steps.

Keys and values of a cross-attention to text depend neither on the latents nor on the noise level.
"""

import re
import threading
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn


class _Call(NamedTuple):
    given: Tensor
    result: Tensor


class TextProjectionCache:
    """Makes layers return the result of their last call if they get the same tensor again.

    Each thread has its own results, because it takes all steps of a batch. In gradient mode nothing is remembered.

    Args:
        transformer: its layers are changed in place.
        layers: regular expression that matches the whole dotted name of each layer that sees only the prompt.
    """

    def __init__(self, transformer: nn.Module, layers: str) -> None:
        self._calls = threading.local()
        for name, module in transformer.named_modules():
            if re.fullmatch(layers, name):
                module.forward = partial(self._once, name, module.forward)

    def forget(self) -> None:
        """Drop all results, because weights have changed."""
        self._calls = threading.local()

    def _once(self, name: str, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return forward(x)
        calls: dict[str, _Call] = vars(self._calls)
        if name not in calls or not _is_same(calls[name].given, x):
            calls[name] = _Call(x, forward(x))
        return calls[name].result


def _is_same(known: Tensor, x: Tensor) -> bool:
    """Whether two tensors are views of the same values. While `known` exists, no other tensor has its address."""
    return (known.data_ptr(), known.shape, known.stride(), known.dtype) == (x.data_ptr(), x.shape, x.stride(), x.dtype)
