"""Linear layers in FP8 (E4M3) on the GPU's FP8 units.

Weights and activations have one scale per row: a token or an output channel. So a candidate does not depend on the rest
of its batch, and large values of one token do not round other tokens away. The product is torch's.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from solrl_core.kernels.rows import quantize_rows
from solrl_core.precision.layers import QuantLayer, QuantLinear, QuantPointwiseConv

MULTIPLE = 16
"""Both sides of a weight must be multiples of this."""
_TRACES_PUBLIC_PRODUCT = torch.__version__ >= "2.13"
"""Whether torch.compile can trace the public product: torch 2.11 has it, but Dynamo stops there."""


class Quantized(NamedTuple):
    """Input of FP8 layers, already quantised by row: once for several layers, or by the kernel that computed it.

    Attributes:
        codes: E4M3 [..., K].
        scales: float32 [..., 1].
        dtype: dtype of the layers' output.
    """

    codes: Tensor
    scales: Tensor
    dtype: torch.dtype


@cache
def has_fp8(device: torch.device) -> bool:
    """Whether `device` has FP8 units, and torch's product with scales per row is right on it."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        return False
    return product_is_right(device)


def product_is_right(device: torch.device) -> bool:
    """Whether a small product comes out right."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).to(device)
    # One scale for all rows would round most of them to zero.
    x[0] *= 1e6
    expected = x @ x.T
    try:
        codes, scales = quantize_rows(x, "")
        got = product(codes, scales, codes, scales, None).float()
    except torch.OutOfMemoryError:
        raise
    except Exception:  # of a kernel that does not compile, too
        return False
    # FP8 alone leaves an error of 0.04.
    return bool(torch.linalg.norm(got[1:, 1:] - expected[1:, 1:]) < 0.1 * torch.linalg.norm(expected[1:, 1:]))


def require_fp8(device: torch.device) -> None:
    """Raise ValueError, naming the precisions that work, if a device has no FP8; the meta device has it."""
    if device.type != "meta" and not has_fp8(device):
        what = torch.cuda.get_device_name(device) if device.type == "cuda" else f"this {device.type.upper()}"
        raise ValueError(
            f"precision fp8: {what} has no FP8 matrix units (Ada, Hopper and Blackwell GPUs do); "
            "use bf16, or nvfp4, which is emulated if it is not native"
        )


def product(codes: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None) -> Tensor:
    """E4M3 [M, K] × [N, K]ᵀ → bfloat16 [M, N], of codes with their scales [M, 1] and [N, 1], and a bias [N].

    Call it on the default stream: on compute capability 8.9, torch before 2.12 launches it there whatever the current
    stream is (pytorch#177651).
    """
    if _TRACES_PUBLIC_PRODUCT:
        row = F.ScalingType.RowWise
        return F.scaled_mm(codes, weight.t(), scales, row, weight_scales.t(), row, bias=bias, use_fast_accum=True)
    return torch._scaled_mm(
        codes,
        weight.t(),
        scale_a=scales,
        scale_b=weight_scales.t(),
        bias=bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


class _Fp8(QuantLayer):
    """Mixin that replaces the emulated arithmetic of a quantised layer with FP8.

    Attributes:
        activation: activation function to apply to the input, taken over from the module before; a key of
            `solrl_core.kernels.ACTIVATIONS`.
    """

    scale: Tensor
    activation: str

    def _hold(self, weight: Tensor, bias: Tensor | None) -> None:
        if weight.shape[0] % MULTIPLE or weight.shape[1] % MULTIPLE:
            raise ValueError(f"FP8 weights need both axes to be multiples of {MULTIPLE}: got {tuple(weight.shape[:2])}")
        require_fp8(weight.device)
        self.activation = ""
        codes, scale = quantize_rows(weight.detach().flatten(1).float(), "")
        self.register_buffer("weight", codes)
        self.register_buffer("scale", scale)
        bias_copy = None if bias is None else bias.detach().to(torch.bfloat16, copy=True)
        self.register_buffer("bias", bias_copy)

    def _write(self, weight: Tensor) -> None:
        codes, scale = quantize_rows(weight.to(self.weight.device).flatten(1).float(), "")
        self.weight.copy_(codes)
        self.scale.copy_(scale)

    def _linear(self, x: Tensor) -> Tensor:
        return self.of_parts([(x, self.activation)])

    def of_parts(self, parts: Sequence[tuple[Tensor, str]]) -> Tensor:
        """Output [..., out] for an input given in parts along its last axis, without concatenating them.

        Args:
            parts: (tensor [..., part of in], activation); each part is quantised on its own.
        """
        widths = [x.shape[-1] for x, _ in parts]
        products: list[Tensor] = []
        for (x, activation), weight in zip(parts, torch.split(self.weight, widths, 1), strict=True):
            x = x if x.stride(-1) == 1 else x.contiguous()  # torch.compile fuses the copy into the producer
            codes, scale = quantize_rows(x, activation)
            bias = None if products else self.bias
            products.append(product(codes, scale, weight, self.scale, bias).view(*x.shape[:-1], -1))
        return sum(products[1:], products[0])


class Fp8Linear(_Fp8, QuantLinear):
    """``nn.Linear`` in FP8; ValueError if the device has no FP8 units or a size is not a multiple of 16."""

    def forward(self, x: Tensor | Quantized) -> Tensor:
        """`x` [..., in], which may be `Quantized`, → [..., out] in `x.dtype`."""
        if not isinstance(x, Quantized):
            return super().forward(x)
        codes, scales = x.codes.flatten(0, -2), x.scales.flatten(0, -2)
        out = product(codes, scales, self.weight, self.scale, self.bias)
        return out.view(*x.codes.shape[:-1], -1).to(x.dtype)


def by_row(layers: Sequence[nn.Module]) -> TypeGuard[Sequence[Fp8Linear]]:
    """Whether all `layers` are FP8, and so accept a `Quantized` input."""
    return all(isinstance(layer, Fp8Linear) for layer in layers)


def project(layers: Sequence[nn.Module], x: Tensor | Quantized) -> list[Tensor]:
    """Apply each layer to `x` [..., in]; if all are FP8, quantise `x` only once.

    Layers whose class has a function `together` are applied by it.
    """
    if together := getattr(layers[0], "together", None):
        outputs: list[Tensor] = together(layers, x)
        return outputs
    if by_row(layers) and not isinstance(x, Quantized):
        layers[0].require_no_gradient(x)
        codes, scales = quantize_rows(x, "")
        x = Quantized(codes.view(x.shape), scales.view(*x.shape[:-1], 1), x.dtype)
    return [layer(x) for layer in layers]


class Fp8PointwiseConv(_Fp8, QuantPointwiseConv):
    """1×1 ``nn.Conv2d`` in FP8."""
