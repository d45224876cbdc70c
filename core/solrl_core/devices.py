"""Names of devices, checked before anything is loaded, and copies to devices."""

import re
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator

if TYPE_CHECKING:
    import torch

_NAME = re.compile("auto|cpu|cuda(:[0-9]{1,3})?")


def _named(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"got device {name!r}; expected auto, cpu, cuda, or cuda:1 with the number of a GPU")
    return name


DeviceName = Annotated[str, AfterValidator(_named)]
"""cpu, cuda, cuda:1, …, or auto."""


def resolve_device(name: str) -> str:
    """The name of a torch device; `auto` is CUDA if available, otherwise the CPU."""
    if name != "auto":
        return name
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def require_device(name: str) -> str:
    """The name of a torch device of this machine, as `resolve_device`.

    Raises:
        ValueError: it is no name of a device, or this machine lacks it.
    """
    device = resolve_device(_named(name))
    if device.startswith("cuda"):
        import torch

        count = torch.cuda.device_count()
        if not count:
            raise ValueError(
                f"got device {name}, and PyTorch finds no GPU; expected cpu or auto, or a CUDA build of PyTorch and a "
                "driver for this machine's GPU"
            )
        if int(device.partition(":")[2] or 0) >= count:
            raise ValueError(
                f"got device {name}, and PyTorch finds {count} GPUs; expected a number below {count}, auto or cpu"
            )
    return device


def upload(values: "torch.Tensor", device: "torch.device") -> "torch.Tensor":
    """The values on `device`. Copies from a CPU to a GPU use pinned memory, so that nothing waits for them."""
    if device.type == "cuda" and values.device.type == "cpu":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)
