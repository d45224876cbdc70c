"""Marks of tests that need a GPU, and the measure of a difference."""

import pytest
import torch
from solrl_core.kernels.operation import has_descriptors
from solrl_core.precision import has_fp8
from torch import Tensor

_DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

GPU = pytest.mark.skipif(_DEVICE.type == "cpu", reason="needs a CUDA GPU")
FP8 = pytest.mark.skipif(not has_fp8(_DEVICE), reason="needs a GPU with FP8 units")
HOPPER = pytest.mark.skipif(not has_descriptors(_DEVICE), reason="needs a GPU from Hopper on")


@torch.no_grad()
def relative(found: Tensor, expected: Tensor) -> float:
    """Length of the difference in lengths of what was expected, wherever both are."""
    found, expected = found.cpu().double(), expected.cpu().double()
    return float(torch.linalg.norm(found - expected) / torch.linalg.norm(expected))
