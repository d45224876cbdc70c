"""Linear layers in NVFP4 on Blackwell's NVFP4 units, through Transformer Engine's recipe, quantisers and product.

``te.Linear`` with a cached weight breaks the graph of a compiled block. These layers multiply by one custom operator
over plain tensors instead. Transformer Engine's quantiser fills their weight buffers.

An activation has one float32 scale for each row, so a candidate does not depend on the rest of its batch.
"""

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from solrl_core.precision.fp8 import has_fp8
from solrl_core.precision.layers import QuantLayer, QuantLinear, QuantPointwiseConv

MULTIPLE = 32
"""16 bytes of 4-bit values. Both sides of a weight must be multiples of this; tokens are padded to it."""
NVFP4_CAPABILITY = (10, 0)


def engine_version() -> str | None:
    """Installed version of Transformer Engine; None if it is not installed, ValueError if it cannot be imported."""
    if find_spec("transformer_engine") is None:
        return None
    try:
        import transformer_engine
        import transformer_engine.pytorch  # noqa: F401
    except Exception as error:  # a build for another CUDA or torch fails in many ways
        raise ValueError(f"Transformer Engine is broken: {type(error).__name__}: {error}") from error
    return str(transformer_engine.__version__)


@cache
def nvfp4_obstacle(device: torch.device) -> str | None:
    """Reason why `device` does not support native NVFP4; None if it does."""
    if device.type != "cuda":
        return f"only a Blackwell GPU has NVFP4 units, this is {device.type.upper()}"
    capability = torch.cuda.get_device_capability(device)
    if capability < NVFP4_CAPABILITY:
        return f"compute capability {_dotted(capability)}, NVFP4 needs {_dotted(NVFP4_CAPABILITY)}"
    try:
        if engine_version() is None:
            return "Transformer Engine is not installed (pip install --no-build-isolation 'solrl[nvfp4]')"
    except ValueError as error:
        return str(error)
    return None


class _Te(QuantLayer):
    """Mixin that replaces the emulated arithmetic of a quantised layer with Transformer Engine's."""

    def _hold(self, weight: Tensor, bias: Tensor | None) -> None:
        if weight.shape[0] % MULTIPLE or weight.shape[1] % MULTIPLE:
            shape = tuple(weight.shape[:2])
            raise ValueError(f"native NVFP4 weights need both axes to be multiples of {MULTIPLE}: got {shape}")
        if (obstacle := nvfp4_obstacle(weight.device)) is not None:
            alternatives = "fp8 or bf16" if has_fp8(weight.device) else "bf16"
            raise ValueError(f"native nvfp4 by Transformer Engine: {obstacle}; use {alternatives}, or emulated nvfp4")
        parts = _engine(weight.device).quantize_weight(weight)
        self._names = ["weight", *(f"scale_{i}" for i in range(1, len(parts)))]
        for name, part in zip(self._names, parts, strict=True):
            self.register_buffer(name, part)
        bias_copy = None if bias is None else bias.detach().to(torch.bfloat16, copy=True)
        self.register_buffer("bias", bias_copy)

    def _write(self, weight: Tensor) -> None:
        new = _engine(self.weight.device).quantize_weight(weight.to(self.weight.device))
        for part, value in zip(self._parts(), new, strict=True):
            part.copy_(value)

    def _linear(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out: Tensor = product(rows, self._parts(), self.bias, self.weight.shape[0])
        return out.view(*x.shape[:-1], -1)

    def _parts(self) -> list[Tensor]:
        return [getattr(self, name) for name in self._names]


class TeLinear(_Te, QuantLinear):
    """``nn.Linear`` in native NVFP4; ValueError if the device has none or a size is not a multiple of 32."""


class TePointwiseConv(_Te, QuantPointwiseConv):
    """1×1 ``nn.Conv2d`` in native NVFP4."""


NVFP4_SETTINGS: dict[str, Any] = {
    # These three help training only: they reduce accuracy or make the result random.
    "disable_rht": True,
    "disable_stochastic_rounding": True,
    "disable_2d_quantization": True,
    "row_scaled_activation": True,
    "nvfp4_4over6": "none",
    "nvfp4_4over6_e4m3_use_256": "all",
    "nvfp4_4over6_err_mode": "MAE",
    "fp8_dpa": False,
    "fp8_mha": False,
    "backward_override": None,
}
"""All settings of NVFP4BlockScaling but its formats: environment variables would change omitted settings."""


@torch.library.custom_op("solrl::te_linear", mutates_args=())
def product(x: Tensor, weight: list[Tensor], bias: Tensor | None, out_features: int) -> Tensor:
    """x [M, K] in any float dtype × weight [N, K]ᵀ, quantised to NVFP4 → bfloat16 [M, N]."""
    rows = x.to(torch.bfloat16)
    if len(x) % MULTIPLE:
        rows = F.pad(rows, (0, 0, 0, -len(x) % MULTIPLE))
    return _engine(x.device).product(rows, weight, bias)[: len(x)]


@product.register_fake
def _(x: Tensor, weight: list[Tensor], bias: Tensor | None, out_features: int) -> Tensor:
    return x.new_empty(x.shape[0], out_features, dtype=torch.bfloat16)


class _Engine:
    """Quantisers and matrix product of Transformer Engine's NVFP4 recipe on one device."""

    def __init__(self, device: torch.device) -> None:
        from transformer_engine.common.recipe import NVFP4BlockScaling
        from transformer_engine.pytorch.quantization import RecipeState

        recipe = NVFP4BlockScaling(**NVFP4_SETTINGS)
        self._device = device
        with torch.cuda.device(device):
            state = RecipeState.create(recipe, mode="forward", num_quantizers=2, device=device)
            self._activation, self._weight = state.make_quantizers()
        for quantizer in (self._activation, self._weight):
            quantizer.set_usage(rowwise=True, columnwise=False)  # only training needs the columns
            quantizer.internal = True  # bare storage instead of a tensor subclass: less CPU overhead
        # The same choice as te.Linear's.
        self._split = getattr(getattr(recipe, "fp8_gemm_fprop", None), "use_split_accumulator", False)
        self._storage = self._quantize(self._weight, torch.zeros(MULTIPLE, MULTIPLE, device=device))
        self._keys = [key for key, value in self._storage.get_metadata().items() if isinstance(value, Tensor)]

    def quantize_weight(self, weight: Tensor) -> list[Tensor]:
        """weight [N, K, ...] → its codes and scales, in the recipe's order."""
        metadata = self._quantize(self._weight, weight.detach().flatten(1).float()).get_metadata()
        return [metadata[key] for key in self._keys]

    def product(self, x: Tensor, weight: list[Tensor], bias: Tensor | None) -> Tensor:
        """x bfloat16 [k · 32, K] × weight [N, K]ᵀ from `quantize_weight` → bfloat16 [k · 32, N]."""
        from transformer_engine.pytorch.cpp_extensions import general_gemm

        metadata = self._storage.get_metadata() | dict(zip(self._keys, weight, strict=True))
        with torch.cuda.device(self._device):
            out, *_ = general_gemm(
                type(self._storage)(**metadata),
                self._quantize(self._activation, x),
                out_dtype=torch.bfloat16,
                bias=bias,
                use_split_accumulator=self._split,
            )
        return out  # type: ignore[no-any-return]

    def _quantize(self, quantizer: Any, values: Tensor) -> Any:
        with torch.no_grad(), torch.cuda.device(self._device):
            return quantizer(values.contiguous())


@cache
def _engine(device: torch.device) -> _Engine:
    return _Engine(device)


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
