"""LoRAs in the layouts of diffusers, PEFT, ComfyUI and kohya, by the modules of diffusers' transformer.

No tensor of a file is ignored: an unknown tensor is refused by its name.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from solrl_core.families.original_layers import ORIGINAL_LAYERS, OriginalLayer

_KEY = re.compile(
    r"(?:(?:base_model\.model|transformer|model|diffusion_model)\.)*(?:lora_unet_)?(?P<name>.+)\."
    r"(?:lora_(?P<part>A|B|down|up)(?:\.default)?\.weight|(?P<alpha>alpha))"
)
_PARTS = {"A": "lora_A", "down": "lora_A", "B": "lora_B", "up": "lora_B", None: "alpha"}
_SHOWN = 3


@dataclass(frozen=True)
class FileLayer:
    """A layer of a file.

    Attributes:
        name: name in the file, without its prefix.
        key: the name of `b` in the file.
        a: float32 [rank, in].
        b: float32 [out, rank].
        alpha: value of the tensor `alpha` beside them; None without it.
    """

    name: str
    key: str
    a: Tensor
    b: Tensor
    alpha: float | None

    @property
    def rank(self) -> int:
        """Rows of `a`, at least 1."""
        return len(self.a)


class ModuleChange(NamedTuple):
    """The change of a module, b · a; ranks that change nothing are left out, so there may be none."""

    a: Tensor
    b: Tensor


def read_layers(tensors: Mapping[str, Tensor]) -> list[FileLayer]:
    """The layers of a file, whatever its layout.

    Raises:
        ValueError: a tensor is no part of a plain LoRA, is there twice or not finite, or a part is missing.
    """
    by_layer: dict[str, dict[str, str]] = {}
    names = {}
    for key, tensor in tensors.items():
        if (match := _KEY.fullmatch(key)) is None:
            raise ValueError(
                f"has {key}; expected lora_A, lora_B and alpha of the transformer's modules alone: without the rest it "
                "would be another LoRA (of DoRA, LoKr or trained biases, say), so choose a plain one"
            )
        if not torch.isfinite(tensor).all():
            raise ValueError(f"has values in {key} that are not finite; expected a LoRA whose training did not diverge")
        layer, part = match["name"].replace(".", "_"), _PARTS[match["part"]]
        if twin := by_layer.setdefault(layer, {}).get(part):
            raise ValueError(f"has both {twin} and {key}, of one layer; expected one: remove the other from the file")
        by_layer[layer][part], names[layer] = key, match["name"]
    if not by_layer:
        raise ValueError("has no tensors; expected lora_A and lora_B of some modules")
    return [_layer(names[layer], parts, tensors) for layer, parts in by_layer.items()]


def _layer(name: str, keys: Mapping[str, str], tensors: Mapping[str, Tensor]) -> FileLayer:
    if not {"lora_A", "lora_B"} <= keys.keys():
        raise ValueError(f"has only {' and '.join(keys)} of {name}; expected both lora_A and lora_B")
    a, b = tensors[keys["lora_A"]], tensors[keys["lora_B"]]
    if a.ndim != 2 or b.ndim != 2 or not len(a) or len(a) != b.shape[1]:
        raise ValueError(
            f"has {keys['lora_B']} {list(b.shape)} and {keys['lora_A']} {list(a.shape)}; expected [out, rank] and "
            "[rank, in], of rank 1 or more"
        )
    alpha = tensors[keys["alpha"]] if "alpha" in keys else None
    if alpha is not None and alpha.numel() != 1:
        raise ValueError(f"has {keys['alpha']} of shape {list(alpha.shape)}; expected one number")
    return FileLayer(name, keys["lora_B"], a, b, None if alpha is None else float(alpha))


def by_module(layers: Collection[FileLayer], family: str, modules: Collection[str]) -> dict[str, ModuleChange]:
    """The change of each module that the layers of a file adapt, without regard to alpha.

    Args:
        layers: layers by the names of diffusers' modules, or of the authors' layers, which may be several modules.
        family: the model's family.
        modules: modules that may be adapted.

    Raises:
        ValueError: a layer is none of these, or of another size, or two layers adapt one module.
    """
    modules_by_name = {module.replace(".", "_"): module for module in modules}
    patterns = [
        (re.compile(layer.name.replace(".", "_").replace("{}", r"(\d+)")), layer)
        for layer in ORIGINAL_LAYERS.get(family, ())
    ]
    changes: dict[str, ModuleChange] = {}
    foreign = []
    for layer in layers:
        name = layer.name.replace(".", "_")
        matched = next(((m[1], original) for pattern, original in patterns if (m := pattern.fullmatch(name))), None)
        if name in modules_by_name:
            parts = {modules_by_name[name]: layer.b}
        elif matched is not None:
            number, original = matched
            rows = _rows_of_modules(original, layer.key, layer.b)
            parts = {module.format(number): part for module, part in zip(original.modules, rows, strict=True)}
        else:
            parts = {layer.name: layer.b}
        for module, b in parts.items():
            nonzero = b.any(0)
            if module in changes:
                raise ValueError(f"has a second layer of {module}, {layer.key}; expected one")
            if module in modules:
                changes[module] = ModuleChange(layer.a[nonzero], b[:, nonzero])
            elif nonzero.any() or module == layer.name:
                foreign.append(module)
    if foreign:
        examples = ", ".join(sorted(foreign)[:_SHOWN])
        raise ValueError(
            f"adapts {len(foreign)} modules that this run does not, such as {examples}; expected some of the run's "
            f"{len(modules_by_name)}, such as {min(modules)}: choose a LoRA of these, or merge this one into the "
            "model's file and train that"
        )
    return changes


def _rows_of_modules(layer: OriginalLayer, key: str, up: Tensor) -> tuple[Tensor, ...]:
    parts = len(layer.modules) + layer.further
    rows, remainder = divmod(len(up), parts)
    if remainder or not rows:
        raise ValueError(
            f"has {len(up)} rows in {key}; expected a multiple of {parts}: a LoRA of another model, choose one of this"
        )
    adapted = len(layer.modules) * rows
    if up[adapted:].any():
        raise ValueError(
            f"changes rows from {adapted} on in {key}: it adapts the MLP, which this run does not; expected zeros "
            "there: choose a LoRA of the attention, or merge this one into the model's file and train that"
        )
    return torch.split(up[:adapted], rows)
