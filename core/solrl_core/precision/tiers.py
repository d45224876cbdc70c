"""What a device does at each precision, found out by one small product of each kind."""

from functools import cache
from typing import Literal, NamedTuple

import torch

from solrl_core.precision.fp8 import fp8_scaling
from solrl_core.precision.te import engine_version, nvfp4_obstacle

Numerics = Literal["native", "emulated"]


class Probed(NamedTuple):
    """One tier on one device.

    Attributes:
        numerics: "native" where the hardware computes in that precision, "emulated" where its rounding is
            reproduced in a wider one, None where the device does not run it.
        how: what computes it; where it is not native, why.
    """

    numerics: Numerics | None
    how: str


@cache
def probe(precision: str, device: torch.device) -> Probed:
    """What `device` does at `precision`; the first time, a small product is made there."""
    if precision == "nvfp4":
        obstacle = nvfp4_obstacle(device)
        if obstacle is None:
            return Probed("native", f"Transformer Engine {engine_version()}, NVFP4BlockScaling")
        return Probed("emulated", f"rounded to NVFP4, multiplied in float32: {obstacle}")
    if precision == "fp8":
        scaling = fp8_scaling(device)
        if scaling is None:
            return Probed(None, "not on this device: it takes an Ada, Hopper or Blackwell GPU")
        return Probed("native", f"torch's scaled product, scaled by {scaling}")
    if device.type != "cuda":
        return Probed("emulated", "bfloat16 weights, float32 arithmetic")
    return Probed("native", "on tensor cores")
