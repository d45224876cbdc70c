"""Low-precision layers: NVFP4 in emulation, the layers that use it, and the policy that places them."""

from solrl_core.precision.fp8 import fp8_scaling
from solrl_core.precision.layers import QuantLinear, QuantPointwiseConv, refresh_weight_
from solrl_core.precision.nvfp4 import quantize_dequantize, quantize_dequantize_per_candidate
from solrl_core.precision.policy import LayerPolicy, apply_policy, linear_flops, quantized_share

__all__ = [
    "LayerPolicy",
    "QuantLinear",
    "QuantPointwiseConv",
    "apply_policy",
    "fp8_scaling",
    "linear_flops",
    "quantize_dequantize",
    "quantize_dequantize_per_candidate",
    "quantized_share",
    "refresh_weight_",
]
