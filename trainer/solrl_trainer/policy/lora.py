"""LoRA adapters of the current and the behaviour policy, injected into the linear layers of a frozen transformer.

On a CPU, outputs and initial weights equal PEFT's bit for bit.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from solrl_core.lora import target_modules
from torch import Tensor, nn

from solrl_trainer.policy.lora_product import lora_product


class LoraWeights(NamedTuple):
    """One adapter of a layer: A [rank, in] and B [out, rank], float32."""

    a: nn.Parameter
    b: nn.Parameter


class LoraLinear(nn.Module):
    """A frozen linear layer with an adapter for each of two policies.

    Attributes:
        scale: alpha / rank.
        current: the trained adapter. A is Gaussian, drawn from torch's global generator in PEFT's order; B is 0.
        old: the adapter of the behaviour policy, initially a copy. Its weights are not parameters of the module.
        active: the adapter in use; None for the base alone. It is an attribute rather than a name to look up, so that
            both adapters share compiled code.
    """

    def __init__(self, base: nn.Linear, rank: int, alpha: float, device: torch.device | None = None) -> None:
        super().__init__()
        self.base = base
        self.scale = alpha / rank
        # As in PEFT, each nn.Linear draws weights that are then overwritten; this keeps the generator in step.
        a = nn.Linear(base.in_features, rank, bias=False, device="cpu").weight
        b = nn.Linear(rank, base.out_features, bias=False, device="cpu").weight
        nn.init.normal_(a, std=1 / rank)
        nn.init.zeros_(b)
        self.lora_A, self.lora_B = (nn.Parameter(weight.detach().to(device or base.weight.device)) for weight in (a, b))
        self.current = LoraWeights(self.lora_A, self.lora_B)
        self.old = LoraWeights(*(nn.Parameter(weight.detach().clone()) for weight in self.current))
        self.active: LoraWeights | None = self.current

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] → [..., out]."""
        if self.active is None:
            out: Tensor = self.base(x)
            return out
        if self.base.weight.dtype == torch.float32:
            out = self.base(x)
            return out + F.linear(F.linear(x, self.active.a), self.active.b) * self.scale
        return self.together([self], x)[0]

    @staticmethod
    def together(layers: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
        """Apply layers that share the input `x` [..., in], which is read once for all adapters."""
        adapted = [layer for layer in layers if isinstance(layer, LoraLinear)]
        active = [layer.active for layer in adapted if layer.active is not None]
        if len(active) < len(adapted) or adapted[0].base.weight.dtype == torch.float32:
            return [layer(x) for layer in layers]
        products = lora_product(
            x.reshape(-1, x.shape[-1]),
            [layer.base.weight for layer in adapted],
            [layer.base.bias for layer in adapted if layer.base.bias is not None],
            [pair.a for pair in active],
            [pair.b for pair in active],
            adapted[0].scale,
        )
        outputs = iter(products)
        return [
            next(outputs).view(*x.shape[:-1], -1) if isinstance(layer, LoraLinear) else layer(x) for layer in layers
        ]


def chosen_layers(transformer: nn.Module, family: str, targets: str | None) -> str:
    """Pattern of a clean transformer's layers that `family` and `targets`, if any, match; ValueError: none does."""
    if targets is None:
        return family
    names = list(target_modules(transformer, family))
    chosen = [name for name in names if re.fullmatch(targets, name)]
    if not chosen:
        raise ValueError(
            f"lora.targets={targets!r} matches none of the {len(names)} layers that the model's family adapts, such as "
            f"{names[0]}; expected a regular expression of whole names, such as '.*\\.{names[0].rpartition('.')[2]}'"
        )
    return "|".join(map(re.escape, chosen))


def inject(
    transformer: nn.Module, targets: str, rank: int, alpha: float, device: torch.device | None = None
) -> dict[str, LoraLinear]:
    """Replace each linear layer whose full dotted name matches `targets` by a `LoraLinear`; return these by name.

    `device` holds the adapters; by default, that of each layer.
    """
    layers = {}
    for name, module in target_modules(transformer, targets).items():
        layers[name] = LoraLinear(module, rank, alpha, device)
        parent, _, child = name.rpartition(".")
        setattr(transformer.get_submodule(parent), child, layers[name])
    return layers
