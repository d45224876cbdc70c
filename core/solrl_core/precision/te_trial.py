"""Trial products of native NVFP4: `python -m solrl_core.precision.te_trial INDEX` prints why GPU INDEX fails them.

A process of its own runs them, because a fault in a kernel leaves the CUDA of its process unusable.
"""

import sys
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from solrl_core.precision.nvfp4 import quantize_dequantize

TOLERANCE = 0.01
"""Largest relative error of a row. Rounding to BF16 gives 0.002, a precision other than NVFP4 0.14."""


class Case(NamedTuple):
    """Sizes of a product, and what its inputs [rows, depth] are multiplied by."""

    rows: int
    depth: int
    outs: int
    factor: Callable[[Tensor], Tensor | float] = lambda x: 1.0


def _one_large_row(x: Tensor) -> Tensor:
    return torch.where(torch.arange(len(x), device=x.device) == 5, 1e4, 1.0)[:, None]


def _large_channels(x: Tensor) -> Tensor:
    return torch.where(torch.arange(x.shape[1], device=x.device) % 500 == 3, 1e3, 1.0)


CASES: Mapping[str, Case] = {
    "FLUX.1's longest rows": Case(32, 15360, 3072),
    "FLUX.1's last projection": Case(1152, 3072, 64),
    "rows that 128 does not divide": Case(224, 3072, 12288),
    "small values": Case(256, 2432, 9728, lambda x: 1e-4),
    "zeros": Case(128, 512, 512, lambda x: 0.0),
    "one row that is much larger": Case(128, 3072, 3072, _one_large_row),
    "channels that are much larger": Case(128, 3072, 3072, _large_channels),
}


def fault_of(product: Callable[[Tensor, Tensor], Tensor], device: torch.device) -> str | None:
    """Reason why a product is wrong; None if every case is right.

    Args:
        product: x [rows, depth] × weight [outs, depth]ᵀ, both BF16, in NVFP4 with a scale for each row of x.
        device: device of the tensors.
    """
    noise = torch.Generator(device).manual_seed(0)
    for name, case in CASES.items():
        x = torch.randn(case.rows, case.depth, generator=noise, device=device)
        x = (x * case.factor(x)).to(torch.bfloat16)
        weight = torch.randn(case.outs, case.depth, generator=noise, device=device, dtype=torch.bfloat16)
        got = product(x, weight).float()
        rows = quantize_dequantize(x, amax=x.abs().amax(1, keepdim=True))
        expected = rows @ quantize_dequantize(weight).T
        off, length = (got - expected).norm(dim=1), expected.norm(dim=1)
        if not bool((off <= TOLERANCE * length).all()):
            error = float((off / length).nan_to_num(torch.inf).max())
            return (
                f"{name} [{case.rows}, {case.depth}] × [{case.outs}, {case.depth}]ᵀ: a row is {error:.1%} off what "
                f"NVFP4 should give (at most {TOLERANCE:.0%})"
            )
    return None


def main() -> int:
    from solrl_core.precision.te import native_product

    device = torch.device("cuda", int(sys.argv[1]))
    try:
        fault = fault_of(native_product(device), device)
    except Exception as error:  # of any kind: the reason is what the caller wants
        fault = f"{type(error).__name__}: {error}"
    if fault:
        print(" ".join(fault.split()))
    return int(fault is not None)


if __name__ == "__main__":
    sys.exit(main())
