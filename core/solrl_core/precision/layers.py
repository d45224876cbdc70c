"""Linear layers with emulated NVFP4 weights and activations.

A layer holds only its quantised weight. The generator keeps the clean float32 weight, merges adapters into it and
passes it to ``refresh_``, which writes in place so that captured graphs and views stay valid.
"""

from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from solrl_core.precision.nvfp4 import (
    BLOCK,
    opaque_per_candidate,
    quantize_dequantize,
    quantize_dequantize_per_candidate,
)


class QuantLayer(nn.Module):
    """What all quantised layers share."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self._shape = weight.flatten(1).shape
        self._hold(weight, bias)

    def refresh_(self, weight: Tensor) -> None:
        """Requantise from a clean (merged) float32 ``weight`` into the storage already held."""
        _check_shape(self, weight.flatten(1), self._shape)
        self._write(weight)

    def _hold(self, weight: Tensor, bias: Tensor | None) -> None:
        self.register_buffer("weight", _quantized_weight(weight))
        self.register_buffer("bias", None if bias is None else bias.detach().to(torch.float32, copy=True))

    def _write(self, weight: Tensor) -> None:
        self._require_float32()
        self.weight.copy_(_quantized_weight(weight.to(self.weight.device)).view_as(self.weight))

    def _linear(self, x: Tensor) -> Tensor:
        """``x`` [B, ..., in] → float32 [B, ..., out]."""
        self._require_float32()
        rounded = opaque_per_candidate if torch.compiler.is_compiling() else quantize_dequantize_per_candidate
        values = rounded(x)
        if x.is_meta:
            return F.linear(values, self.weight.flatten(1), self.bias)
        # Autocast would round the quantised values again.
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(values, self.weight.flatten(1), self.bias)

    def require_no_gradient(self, x: Tensor) -> None:
        """Raise RuntimeError if autograd would record a gradient for ``x``."""
        if torch.is_grad_enabled() and x.requires_grad:
            raise RuntimeError(
                f"{type(self).__name__} is for inference only and passes no gradient: "
                "run it under torch.no_grad() or torch.inference_mode()"
            )

    def _require_float32(self) -> None:
        if self.weight.dtype != torch.float32:
            raise TypeError(
                f"{type(self).__name__} has its quantised weight in float32: got {self.weight.dtype}; "
                "cast the model before quantising it, not after"
            )


class QuantLinear(QuantLayer):
    """``nn.Linear`` with NVFP4 weight and activations.

    ``weight`` [out, in] holds the quantised values in float32 (1×16 blocks along in, one tensor scale).
    Activations have one float32 scale per index of axis 0, so a candidate does not depend on the rest of its
    batch. The matrix product is in float32 and the result in the input's dtype. Inference only: RuntimeError if a
    gradient is required, TypeError if the module was cast away from float32.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(weight, bias)
        self.out_features, self.in_features = weight.shape

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> Self:
        """Quantise ``linear``'s weight; ValueError if in_features is not a multiple of 16."""
        return cls(linear.weight, linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [B, ..., in] → [B, ..., out] in ``x``'s dtype."""
        self.require_no_gradient(x)
        return self._linear(x).to(x.dtype)


class QuantPointwiseConv(QuantLayer):
    """1×1 ``nn.Conv2d`` with NVFP4 weight and activations: ``QuantLinear`` over the channels of NCHW.

    ``weight`` keeps the convolution's shape [out, in, 1, 1].
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(weight, bias)
        self.out_channels, self.in_channels = weight.shape[:2]

    @classmethod
    def from_conv(cls, conv: nn.Conv2d) -> Self:
        """Quantise ``conv``'s weight; ValueError unless it is pointwise with channels a multiple of 16."""
        if not is_pointwise(conv):
            raise ValueError(f"expected a 1×1 Conv2d with stride 1, padding 0, groups 1: got {conv}")
        return cls(conv.weight, conv.bias)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [B, in, H, W] → [B, out, H, W] in ``x``'s dtype."""
        self.require_no_gradient(x)
        # The matrix product is up to three times slower on a permuted view.
        return self._linear(x.movedim(1, -1).contiguous()).movedim(-1, 1).to(x.dtype)


def is_pointwise(module: nn.Module) -> bool:
    """Whether ``module`` is a 1×1 ``nn.Conv2d``, which is a linear layer over the channels."""
    return (
        isinstance(module, nn.Conv2d)
        and tuple(module.kernel_size) == (1, 1)
        and tuple(module.stride) == (1, 1)
        and module.padding in ((0, 0), "valid", "same")
        and module.groups == 1
    )


def refresh_weight_(module: nn.Module, weight: Tensor) -> None:
    """Write a clean (merged) float32 ``weight`` into ``module`` in place, at the precision it serves.

    A quantised layer requantises. ``nn.Linear`` and ``nn.Conv2d`` round the weight to BF16 and store it in their
    own dtype. TypeError for any other module, ValueError for a different shape.
    """
    if isinstance(module, QuantLinear | QuantPointwiseConv):
        module.refresh_(weight)
    elif isinstance(module, nn.Linear | nn.Conv2d):
        _check_shape(module, weight, module.weight.shape)
        module.weight.data.copy_(weight.detach().to(torch.bfloat16))
    else:
        raise TypeError(
            f"cannot refresh a {type(module).__name__}: expected Linear, Conv2d, QuantLinear or QuantPointwiseConv"
        )


def _quantized_weight(weight: Tensor) -> Tensor:
    if weight.ndim < 2 or weight.shape[1] % BLOCK:
        raise ValueError(f"NVFP4 weights need in-features that are a multiple of {BLOCK}: got {tuple(weight.shape)}")
    return quantize_dequantize(weight.detach().flatten(1)).view(weight.shape)


def _check_shape(module: nn.Module, weight: Tensor, expected: torch.Size) -> None:
    # copy_ would silently broadcast a wrong shape.
    if weight.shape != expected:
        raise ValueError(
            f"weight for {type(module).__name__}: got shape {tuple(weight.shape)}, expected {tuple(expected)}"
        )
