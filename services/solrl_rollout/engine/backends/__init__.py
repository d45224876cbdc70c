"""Backends that a service loads: in this process, or in vLLM-Omni's."""

from collections.abc import Callable

import torch
from solrl_core.families import load_backbone
from solrl_core.model_options import ImageSize
from solrl_core.precision.fp8 import require_fp8
from solrl_core.precision.te import nvfp4_obstacle
from solrl_engine.backend import Backend
from solrl_engine.local_backend import LocalBackend

from solrl_rollout.settings import ModelSpec, RolloutSettings

__all__ = ["BackendLoader", "load_backend"]

BackendLoader = Callable[[ModelSpec, RolloutSettings], Backend]
"""Loads the backend of one model. Raises ValueError, OSError or RuntimeError if it cannot be loaded."""


def load_backend(spec: ModelSpec, settings: RolloutSettings) -> Backend:
    """Load the backend of one model.

    Raises:
        ValueError, OSError, RuntimeError: the model cannot be loaded, or the device does not support the precision.
        torch.OutOfMemoryError: it does not fit.
    """
    if settings.engine == "vllm-omni":
        from solrl_rollout.engine.backends.vllm_omni.backend import VllmOmniBackend

        return VllmOmniBackend(spec, settings)
    device = torch.device(settings.torch_device)
    emulates = settings.emulate or device.type == "cpu"
    # Before a large model is loaded.
    if settings.precision == "fp8":
        require_fp8(device)
    if settings.precision == "nvfp4" and not emulates and (obstacle := nvfp4_obstacle(device)):
        raise ValueError(
            f"precision nvfp4: {obstacle}. Emulated, it is slower than BF16: use auto or another precision, or serve "
            "with --emulate to study its ranks"
        )
    backbone = load_backbone(
        spec.location,
        device=str(device),
        revision=spec.revision,
        size=ImageSize(settings.height, settings.width, settings.frames),
    )
    return LocalBackend(backbone, emulates=emulates)
