"""Low-precision layers (NVFP4 native and emulated, FP8), the policy that selects them, and device support."""

from solrl_core.precision.layer_policy import LayerPolicy

__all__ = ["LayerPolicy"]
