"""Fused operations: one Triton kernel each on a GPU, the same arithmetic in plain torch elsewhere."""

from solrl_core.kernels.attention import attend
from solrl_core.kernels.bounded_attention import are_bounded
from solrl_core.kernels.convolve import convolve, convolve_norm
from solrl_core.kernels.depthwise import silu_depthwise_glu
from solrl_core.kernels.fp8_attention import fp8_attention, has_fp8_attention
from solrl_core.kernels.group_norm import group_norm_silu
from solrl_core.kernels.linear_attention import linear_attention, plain_linear_attention
from solrl_core.kernels.modulate import add_norm_modulate_quantize, norm_modulate_quantize
from solrl_core.kernels.rope import rms_norm_rope
from solrl_core.kernels.rows import ACTIVATIONS, E4M3_MAX, TINY, quantize_rows
from solrl_core.kernels.wide_attention import wide_attention

__all__ = [
    "ACTIVATIONS",
    "E4M3_MAX",
    "TINY",
    "add_norm_modulate_quantize",
    "are_bounded",
    "attend",
    "convolve",
    "convolve_norm",
    "fp8_attention",
    "group_norm_silu",
    "has_fp8_attention",
    "linear_attention",
    "norm_modulate_quantize",
    "plain_linear_attention",
    "quantize_rows",
    "rms_norm_rope",
    "silu_depthwise_glu",
    "wide_attention",
]
