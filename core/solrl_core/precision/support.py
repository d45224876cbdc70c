"""Precisions: support by a device, native or emulated, tested with one small matrix product each."""

from functools import cache
from typing import NamedTuple, get_args

import torch
from solrl_proto.identifiers import Precision
from solrl_proto.models import Numerics

from solrl_core.precision.fp8 import has_fp8
from solrl_core.precision.te import engine_version, nvfp4_obstacle

PRECISIONS: tuple[Precision, ...] = get_args(Precision)
"""All precisions, the fastest first."""


class PrecisionSupport(NamedTuple):
    """Support for one precision on one device.

    Attributes:
        numerics: "native" if the hardware computes in that precision, "emulated" if its rounding is reproduced in
            a wider one, None if the device cannot run it.
        how: the implementation; if it is not native, the reason.
    """

    numerics: Numerics | None
    how: str


@cache
def probe(precision: str, device: torch.device) -> PrecisionSupport:
    """Test whether `device` supports `precision`. Cached: the small product runs only on the first call."""
    if precision == "nvfp4":
        obstacle = nvfp4_obstacle(device)
        if obstacle is None:
            return PrecisionSupport("native", f"Transformer Engine {engine_version()}, NVFP4BlockScaling")
        return PrecisionSupport("emulated", f"rounded to NVFP4, multiplied in float32: {obstacle}")
    if precision == "fp8":
        if not has_fp8(device):
            return PrecisionSupport(None, "not on this device: it takes an Ada, Hopper or Blackwell GPU")
        return PrecisionSupport("native", "torch's product with a scale for each row")
    if device.type != "cuda":
        return PrecisionSupport("emulated", "bfloat16 weights, float32 arithmetic")
    return PrecisionSupport("native", "on tensor cores")


def numerics(precision: str, device: torch.device) -> Numerics:
    """Numerics of a precision on a device: native, or emulated with its rounding in a wider precision."""
    return probe(precision, device).numerics or "emulated"


def supported_precisions(device: torch.device) -> tuple[Precision, ...]:
    """Precisions that `device` supports, native or emulated, in the order of `PRECISIONS`."""
    return tuple(precision for precision in PRECISIONS if probe(precision, device).numerics is not None)


def fastest_precision(device: torch.device) -> Precision:
    """The fastest native precision of `device`, never an emulation; BF16 on a CPU."""
    return next((precision for precision in PRECISIONS if probe(precision, device).numerics == "native"), "bf16")
