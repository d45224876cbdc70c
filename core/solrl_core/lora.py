"""Which modules an adapter binds, and merging it into a transformer in place."""

import re
from collections.abc import Mapping

import torch
from torch import nn

from solrl_core.adapter import Adapter
from solrl_core.precision import refresh_weight_


def target_modules(transformer: nn.Module, targets: str) -> dict[str, nn.Linear]:
    """The linear layers whose whole dotted name matches `targets`.

    Raises:
        ValueError: none does.
    """
    found = {
        name: module
        for name, module in transformer.named_modules()
        if isinstance(module, nn.Linear) and re.fullmatch(targets, name)
    }
    if not found:
        raise ValueError(f"LoRA target pattern {targets!r} matches no linear layer of {type(transformer).__name__}")
    return found


def adapter_layout(transformer: nn.Module, targets: str) -> dict[str, tuple[int, int]]:
    """Module name → (out_features, in_features) of every LoRA target of a clean transformer."""
    return {
        name: (module.out_features, module.in_features) for name, module in target_modules(transformer, targets).items()
    }


class Merger:
    """Keeps the clean weights of the LoRA targets and writes `clean + delta`, summed in float32, in place.

    Each merge starts from the clean weight, so merges do not drift; layers at a lower precision round or
    quantise what is written (`refresh_weight_`).
    """

    def __init__(self, clean: Mapping[str, nn.Linear], transformer: nn.Module) -> None:
        self._clean = {name: module.weight.detach() for name, module in clean.items()}
        self._modules = {name: transformer.get_submodule(name) for name in self._clean}

    @torch.no_grad()
    def merge(self, adapter: Adapter | None) -> None:
        """Serve `adapter`, or the clean base for None.

        Raises:
            ValueError: an adapted weight overflows; nothing was written.
        """
        if adapter is not None:
            adapter = adapter.to(next(iter(self._clean.values())).device)
            # Each sum is made twice: to hold them all until the last is known to be finite takes a model's memory.
            # As BF16, because what is finite in float32 may still overflow where it is rounded.
            finite = [torch.isfinite(self._merged(name, adapter).bfloat16()).all() for name in self._clean]
            broken = [name for name, good in zip(self._clean, torch.stack(finite).tolist(), strict=True) if not good]
            if broken:
                raise ValueError(f"merging the adapter makes {broken[0]} non-finite; nothing was changed")
        for name, module in self._modules.items():
            refresh_weight_(module, self._merged(name, adapter))

    def _merged(self, name: str, adapter: Adapter | None) -> torch.Tensor:
        weight = self._clean[name].float()
        return weight if adapter is None else weight + adapter.delta(name)
