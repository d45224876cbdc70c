"""LoRA on a transformer: the modules that an adapter adapts, and merging an adapter into them in place."""

import re
import weakref
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from solrl_core.adapter import Adapter, lora_a_key
from solrl_core.precision.layers import refresh_weight_
from solrl_core.sampling.cpu_threads import map_in_threads


def target_modules(transformer: nn.Module, targets: str) -> dict[str, nn.Linear]:
    """The linear layers whose whole dotted name matches `targets`.

    Raises:
        ValueError: none does.
    """
    modules = {
        name: module
        for name, module in transformer.named_modules()
        if isinstance(module, nn.Linear) and re.fullmatch(targets, name)
    }
    if not modules:
        raise ValueError(f"LoRA target pattern {targets!r} matches no linear layer of {type(transformer).__name__}")
    return modules


def adapter_layout(transformer: nn.Module, targets: str) -> dict[str, tuple[int, int]]:
    """Module name → (out_features, in_features) of every LoRA target of a clean transformer."""
    return {
        name: (module.out_features, module.in_features) for name, module in target_modules(transformer, targets).items()
    }


class Merger:
    """Merges adapters into a transformer: writes clean weight + change, summed in float32, in place.

    Each merge starts from the clean weight, so merges do not drift. Layers at a lower precision round or quantise the
    sum (`refresh_weight_`).
    """

    def __init__(self, clean: Mapping[str, nn.Linear], transformer: nn.Module) -> None:
        weights = {name: module.weight.detach() for name, module in clean.items()}
        self._modules = {name: transformer.get_submodule(name) for name in weights}
        self._device = next(iter(weights.values())).device
        self._read: Callable[[str], Tensor] = weights.__getitem__
        self._write: Callable[[nn.Module, Tensor], None] = refresh_weight_
        self._finite: weakref.WeakSet[Adapter] = weakref.WeakSet()

    def through(
        self, read: Callable[[str], Tensor], write: Callable[[nn.Module, Tensor], None], device: torch.device
    ) -> None:
        """Read clean weights and write merged ones, float32 on `device`, by these from now on; ranks may share them."""
        self._read, self._write, self._device = read, write, device

    def merge(self, adapter: Adapter | None) -> None:
        """Merge `adapter`; None restores the clean base. A layer that it does not bind keeps its clean weight.

        Raises:
            ValueError: an adapted weight overflows; nothing was written.
        """
        names = list(self._modules)
        there = adapter and adapter.to(self._device)
        if adapter is not None and there is not None and adapter not in self._finite:
            self._require_finite(there, names)
            self._finite.add(adapter)

        @torch.no_grad()
        def write(name: str) -> None:
            self._write(self._modules[name], self._merged(name, there))

        map_in_threads(write, names, self._device)

    def _require_finite(self, adapter: Adapter, names: list[str]) -> None:
        # The sums are computed again for writing: holding all of them would take a model's memory.

        @torch.no_grad()
        def finite(name: str) -> Tensor:
            # In BF16, because a finite float32 value may overflow when it is rounded.
            return torch.isfinite(self._merged(name, adapter).bfloat16()).all()

        good = torch.stack(map_in_threads(finite, names, self._device)).tolist()
        broken = [name for name, is_finite in zip(names, good, strict=True) if not is_finite]
        if broken:
            raise ValueError(f"merging the adapter would make {broken[0]} non-finite; nothing was changed")

    def _merged(self, name: str, adapter: Adapter | None) -> Tensor:
        weight = self._read(name).float()
        return weight if adapter is None or lora_a_key(name) not in adapter.tensors else weight + adapter.delta(name)
