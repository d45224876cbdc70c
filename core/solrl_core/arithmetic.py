"""Conditions that change rounding of equal computations. Digests do not cover them."""

from collections.abc import Mapping

import torch

from solrl_core.sampling.cpu_threads import thread_count


def arithmetic(device: torch.device) -> dict[str, str]:
    """Device, libraries and kernels by name. On a CPU, equal values give equal bits; on a GPU, similar rounding."""
    if device.type == "cpu":
        return {
            "device": f"CPU with {torch.backends.cpu.get_cpu_capability()}",
            "threads": str(thread_count()),
            "torch": torch.__version__,
        }
    return {
        "device": torch.cuda.get_device_name(device),
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
        "float32 products": torch.get_float32_matmul_precision(),
        "torch": torch.__version__,
    }


def differences(theirs: Mapping[str, str], ours: Mapping[str, str]) -> list[str]:
    """Each difference, as text."""
    names = [name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]
    return [f"{name} {theirs.get(name, 'unknown')} (here {ours.get(name, 'none')})" for name in names]
