"""Marks of tests that need a GPU."""

import pytest
import torch
from solrl_core.kernels.operation import has_descriptors
from solrl_core.precision.fp8 import fp8_scaling

_DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

GPU = pytest.mark.skipif(_DEVICE.type == "cpu", reason="needs a CUDA GPU")
FP8 = pytest.mark.skipif(fp8_scaling(_DEVICE) is None, reason="needs a GPU with FP8 units")
HOPPER = pytest.mark.skipif(not has_descriptors(_DEVICE), reason="needs a GPU from Hopper on")
