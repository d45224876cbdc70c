"""Low-precision layers (NVFP4 native and emulated, FP8), the policy that selects them, and device support."""

from solrl_core.precision.fp8 import has_fp8
from solrl_core.precision.layer_policy import LayerPolicy, apply_policy, linear_flops, share_of_flops
from solrl_core.precision.layers import QuantLinear, QuantPointwiseConv, refresh_weight_
from solrl_core.precision.nvfp4 import quantize_dequantize, quantize_dequantize_per_candidate
from solrl_core.precision.support import (
    PRECISIONS,
    PrecisionSupport,
    fastest_precision,
    numerics,
    probe,
    supported_precisions,
)
from solrl_core.precision.te import engine_version, nvfp4_obstacle

__all__ = [
    "PRECISIONS",
    "LayerPolicy",
    "PrecisionSupport",
    "QuantLinear",
    "QuantPointwiseConv",
    "apply_policy",
    "engine_version",
    "fastest_precision",
    "has_fp8",
    "linear_flops",
    "numerics",
    "nvfp4_obstacle",
    "probe",
    "quantize_dequantize",
    "quantize_dequantize_per_candidate",
    "refresh_weight_",
    "share_of_flops",
    "supported_precisions",
]
