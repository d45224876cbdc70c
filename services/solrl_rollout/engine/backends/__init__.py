"""Backends that a service loads: in this process, or in vLLM-Omni's."""

from collections.abc import Callable

import torch
from solrl_core.families import load_backbone
from solrl_core.precision.fp8 import require_fp8
from solrl_engine.backend import Backend
from solrl_engine.local_backend import LocalBackend

from solrl_rollout.settings import ModelSpec, Settings

__all__ = ["BackendLoader", "load_backend"]

BackendLoader = Callable[[ModelSpec, Settings], Backend]
"""Loads the backend of one model. Raises ValueError, OSError or RuntimeError if it cannot be loaded."""


def load_backend(spec: ModelSpec, settings: Settings) -> Backend:
    """Load the backend of one model.

    Raises:
        ValueError, OSError, RuntimeError: the model cannot be loaded, or the device does not support the precision.
        torch.OutOfMemoryError: it does not fit.
    """
    if settings.engine == "vllm-omni":
        from solrl_rollout.engine.backends.vllm_omni import VllmOmniBackend

        return VllmOmniBackend(spec, settings)
    device = torch.device(settings.torch_device)
    if settings.precision == "fp8":
        require_fp8(device)  # before a large model is loaded
    backbone = load_backbone(spec.location, device=str(device), revision=spec.revision, layers=settings.layers)
    return LocalBackend(backbone)
