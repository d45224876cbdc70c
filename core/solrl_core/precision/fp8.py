"""Linear layers in FP8 (E4M3) on the GPU's FP8 units, through torch's scaled matrix product.

Weights and activations have one scale per row where cuBLAS supports it (Hopper, Blackwell), else one per tensor (Ada).
A row is one token or one output channel. With scales per row, a candidate does not depend on the rest of its batch.
"""

from collections.abc import Sequence
from functools import cache
from typing import Literal, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from solrl_core.kernels import ACTIVATIONS, E4M3_MAX, TINY, quantize_rows
from solrl_core.precision.layers import QuantLinear, QuantPointwiseConv

MULTIPLE = 16
"""Both sides of a weight must be multiples of this."""

Scaling = Literal["row", "tensor"]


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
def fp8_scaling(device: torch.device) -> Scaling | None:
    """FP8 scaling that `device` supports, tested with a small product of each kind; None if it supports neither."""
    if device.type != "cuda":
        return None
    if torch.cuda.get_device_capability(device) < (8, 9):
        return None
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).to(device)
    for scaling in ("row", "tensor"):
        try:
            codes, scale = _quantize(x, scaling)
            got = _product(codes, scale, codes, scale, None)
            torch.cuda.synchronize(device)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            continue
        # FP8 alone leaves an error of 0.04.
        if torch.linalg.norm(got.float() - x @ x.T) < 0.1 * torch.linalg.norm(x @ x.T):
            return scaling
    return None


def require_fp8(device: torch.device) -> Scaling:
    """`fp8_scaling` of a device; ValueError that names the precisions that work if it has no FP8 units."""
    if device.type == "meta":
        return "row"
    scaling = fp8_scaling(device)
    if scaling is None:
        what = torch.cuda.get_device_name(device) if device.type == "cuda" else f"this {device.type.upper()}"
        raise ValueError(
            f"precision fp8: {what} has no FP8 matrix units (Ada, Hopper and Blackwell GPUs do); "
            "use bf16, or nvfp4, which is emulated if it is not native"
        )
    return scaling


class _Fp8:
    """Mixin that replaces the emulated arithmetic of a quantised layer with FP8.

    Attributes:
        activation: activation function to apply to the input, taken over from the module before; a key of
            `solrl_core.kernels.ACTIVATIONS`.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor | None
    scaling: Scaling
    activation: str

    def _hold(self, weight: Tensor, bias: Tensor | None) -> None:
        if weight.shape[0] % MULTIPLE or weight.shape[1] % MULTIPLE:
            raise ValueError(f"FP8 weights need both axes to be multiples of {MULTIPLE}: got {tuple(weight.shape[:2])}")
        self.scaling = require_fp8(weight.device)
        self.activation = ""
        codes, scale = _quantize(weight.detach().flatten(1).float(), self.scaling)
        self.register_buffer("weight", codes)  # type: ignore[attr-defined]
        self.register_buffer("scale", scale)  # type: ignore[attr-defined]
        kept = None if bias is None else bias.detach().to(torch.bfloat16, copy=True)
        self.register_buffer("bias", kept)  # type: ignore[attr-defined]

    def _write(self, weight: Tensor) -> None:
        codes, scale = _quantize(weight.to(self.weight.device).flatten(1).float(), self.scaling)
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
            codes, scale = _quantize(x, self.scaling, activation)
            bias = None if products else self.bias
            products.append(_product(codes, scale, weight, self.scale, bias).view(*x.shape[:-1], -1))
        return sum(products[1:], products[0])


class Fp8Linear(_Fp8, QuantLinear):
    """``nn.Linear`` in FP8; ValueError if the device has no FP8 units or a size is not a multiple of 16."""

    def forward(self, x: Tensor | Quantized) -> Tensor:
        """`x` [..., in] → [..., out] in `x.dtype`. A layer scaled by row also takes an input that is `Quantized`."""
        if not isinstance(x, Quantized):
            return super().forward(x)
        product = _product(x.codes.flatten(0, -2), x.scales.flatten(0, -2), self.weight, self.scale, self.bias)
        return product.view(*x.codes.shape[:-1], -1).to(x.dtype)


def by_row(layers: Sequence[nn.Module]) -> TypeGuard[Sequence[Fp8Linear]]:
    """Whether all `layers` are FP8 with scales per row, and so accept a `Quantized` input."""
    return all(isinstance(layer, Fp8Linear) and layer.scaling == "row" for layer in layers)


def project(layers: Sequence[nn.Module], x: Tensor | Quantized) -> list[Tensor]:
    """Apply each layer to `x` [..., in]; if all are FP8 with scales per row, quantise `x` only once.

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


def _quantize(x: Tensor, scaling: Scaling, activation: str = "") -> tuple[Tensor, Tensor]:
    """Apply `activation` to x [..., K]; return E4M3 codes [M, K], float32 scales [M, 1] (row) or [] (tensor)."""
    if scaling == "row":
        codes, scale = quantize_rows(x, activation)
        return codes, scale
    x = ACTIVATIONS[activation](x.reshape(-1, x.shape[-1]))
    scale = (x.abs().amax().float() / E4M3_MAX).clamp(min=TINY)
    return (x.float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scale


def _product(codes: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    """[M, K] × [N, K]ᵀ → bfloat16 [M, N]."""
    return torch._scaled_mm(
        codes,
        weight.t(),
        scale_a=scale,
        scale_b=weight_scale.t() if weight_scale.ndim else weight_scale,
        bias=bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
