"""LoRAs by the layer names of a transformer's authors, which ComfyUI and kohya's trainers use.

Where those fuse layers that diffusers has apart, such as q, k and v, lora_B of the fused layer is block-diagonal.
Sources: `model_lora_keys_unet` of ComfyUI's comfy/lora.py with the maps in comfy/utils.py, and kohya-ss/sd-scripts.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import safetensors.torch
import torch

from solrl_core.adapter import Adapter, lora_a_key, lora_b_key

Layout = Literal["comfyui", "kohya"]

_KEY = re.compile(r"(?:diffusion_model\.|lora_unet_)(.+?)\.(?:lora_(A|B|down|up)\.weight|(alpha))")
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class OriginalLayer:
    """A linear layer of the authors' transformer.

    Attributes:
        name: its dotted name, with {} for the number of its block.
        modules: diffusers' layers whose rows it has one after the other, all of equal height.
        further: height of the rows after theirs, which LoRA does not adapt, in heights of a module.
    """

    name: str
    modules: tuple[str, ...]
    further: int = 0


def _fused(name: str, block: str, names: Sequence[str], further: int = 0) -> OriginalLayer:
    return OriginalLayer(name, tuple(f"{block}.{one}" for one in names), further)


_QKV, _ADDED = ("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj")
_BLOCK = "transformer_blocks.{}"
_DOUBLE = (
    _fused("double_blocks.{}.img_attn.qkv", f"{_BLOCK}.attn", _QKV),
    _fused("double_blocks.{}.img_attn.proj", f"{_BLOCK}.attn", ["to_out.0"]),
)

ORIGINAL_LAYERS: Mapping[str, tuple[OriginalLayer, ...]] = {
    "flux": (*_DOUBLE, _fused("single_blocks.{}.linear1", "single_transformer_blocks.{}.attn", _QKV, further=4)),
    "flux2-klein": (
        *_DOUBLE,
        _fused("double_blocks.{}.txt_attn.qkv", f"{_BLOCK}.attn", _ADDED),
        _fused("double_blocks.{}.txt_attn.proj", f"{_BLOCK}.attn", ["to_add_out"]),
        _fused("double_blocks.{}.img_mlp.0", f"{_BLOCK}.ff", ["linear_in"]),
        _fused("double_blocks.{}.img_mlp.2", f"{_BLOCK}.ff", ["linear_out"]),
        _fused("double_blocks.{}.txt_mlp.0", f"{_BLOCK}.ff_context", ["linear_in"]),
        _fused("double_blocks.{}.txt_mlp.2", f"{_BLOCK}.ff_context", ["linear_out"]),
        _fused("single_blocks.{}.linear1", "single_transformer_blocks.{}.attn", ["to_qkv_mlp_proj"]),
    ),
    "sd3": (
        _fused("joint_blocks.{}.x_block.attn.qkv", f"{_BLOCK}.attn", _QKV),
        _fused("joint_blocks.{}.x_block.attn.proj", f"{_BLOCK}.attn", ["to_out.0"]),
        _fused("joint_blocks.{}.context_block.attn.qkv", f"{_BLOCK}.attn", _ADDED),
        _fused("joint_blocks.{}.context_block.attn.proj", f"{_BLOCK}.attn", ["to_add_out"]),
    ),
    "z-image": tuple(
        _fused(f"{blocks}.{{}}.attention.{name}", f"{blocks}.{{}}.attention", parts)
        for blocks in ("noise_refiner", "context_refiner", "layers")
        for name, parts in (("qkv", _QKV), ("out", ["to_out.0"]))
    ),
    "wan": tuple(
        _fused(f"blocks.{{}}.{theirs}.{name}", f"blocks.{{}}.{ours}", [part])
        for theirs, ours in (("self_attn", "attn1"), ("cross_attn", "attn2"))
        for name, part in zip("qkvo", (*_QKV, "to_out.0"), strict=True)
    ),
    "qwen-image": tuple(
        _fused(f"{_BLOCK}.{name}", _BLOCK, [name])
        for name in (
            *(f"attn.{one}" for one in (*_QKV, "to_out.0", *_ADDED, "to_add_out")),
            *(f"{stream}_mlp.net.{one}" for stream in ("img", "txt") for one in ("0.proj", "2")),
        )
    ),
}
"""Family → its layers that LoRA adapts. SANA has none: neither ComfyUI nor sd-scripts loads it."""


def encode_in_layout(adapter: Adapter, family: str, layout: Layout) -> bytes:
    """Encode an adapter as a safetensors file in a layout; each layer's change is alpha / rank · B · A.

    Raises:
        ValueError: the layout has no names for the family, or for one of its modules.
    """
    if family not in ORIGINAL_LAYERS:
        raise ValueError(
            f"the layout of {layout} has no names for the family {family}; expected one of "
            f"{', '.join(ORIGINAL_LAYERS)}. lora.safetensors has the layout of diffusers"
        )
    places = {name: (layer, at) for layer in ORIGINAL_LAYERS[family] for at, name in enumerate(layer.modules)}
    found: dict[str, tuple[OriginalLayer, dict[int, str]]] = {}
    for module in adapter.modules:
        number = _NUMBER.search(module)
        place = places.get(_NUMBER.sub("{}", module, count=1))
        if number is None or place is None:
            raise ValueError(f"the layout of {layout} has no name for {module} of the family {family}")
        layer, at = place
        found.setdefault(layer.name.format(number[0]), (layer, {}))[1][at] = module
    tensors = {}
    for name, (layer, parts) in found.items():
        key = f"diffusion_model.{name}" if layout == "comfyui" else f"lora_unet_{name.replace('.', '_')}"
        downs = [adapter.tensors[lora_a_key(parts[at])] for at in sorted(parts)]
        ups = [adapter.tensors[lora_b_key(parts[at])] for at in sorted(parts)]
        rows, rank = len(ups[0]), adapter.rank
        whole = torch.zeros((len(layer.modules) + layer.further) * rows, rank * len(parts))
        for index, (at, up) in enumerate(zip(sorted(parts), ups, strict=True)):
            whole[at * rows : (at + 1) * rows, index * rank : (index + 1) * rank] = up
        tensors[f"{key}.lora_down.weight"] = torch.cat(downs)
        tensors[f"{key}.lora_up.weight"] = whole
        tensors[f"{key}.alpha"] = torch.tensor(adapter.alpha * len(parts))
    file: bytes = safetensors.torch.save(tensors, metadata={"format": "pt"})
    return file


def from_layout(tensors: Mapping[str, torch.Tensor], family: str) -> dict[str, torch.Tensor] | None:
    """Tensors of ComfyUI's or kohya's layout in that of diffusers, of scale 1; None if one is of no known layer.

    Ranks that change nothing in a module are left out of it, and so are modules of which nothing is left.

    Raises:
        ValueError: a layer's height is not that of its modules, or rows change that LoRA does not adapt here.
    """
    patterns = [
        (re.compile(layer.name.replace(".", "_").replace("{}", r"(\d+)")), layer)
        for layer in ORIGINAL_LAYERS.get(family, ())
    ]
    read: dict[str, dict[str, torch.Tensor]] = {}
    keys = {}
    for key, tensor in tensors.items():
        if (match := _KEY.fullmatch(key)) is None:
            return None
        name, part = match[1].replace(".", "_"), {"A": "down", "B": "up"}.get(match[2], match[2] or match[3])
        read.setdefault(name, {})[part] = tensor
        keys[name, part] = key
    found = {}
    for name, parts in read.items():
        known = next(((m[1], layer) for pattern, layer in patterns if (m := pattern.fullmatch(name))), None)
        if known is None or not {"down", "up"} <= parts.keys():
            return None
        number, layer = known
        down, up = parts["down"], parts["up"]
        scale = float(parts.get("alpha", len(down))) / len(down)
        for module, own in zip(layer.modules, _rows_of_modules(layer, keys[name, "up"], up), strict=True):
            if (kept := own.any(0)).any():
                found[f"{module.format(number)}.lora_A.weight"] = down[kept]
                found[f"{module.format(number)}.lora_B.weight"] = own[:, kept] * scale
    return found


def _rows_of_modules(layer: OriginalLayer, key: str, up: torch.Tensor) -> tuple[torch.Tensor, ...]:
    parts = len(layer.modules) + layer.further
    rows, rest = divmod(len(up), parts)
    if rest or not rows:
        raise ValueError(
            f"{key} has {len(up)} rows; expected a multiple of {parts}: a LoRA of another model, choose one of this"
        )
    adapted = len(layer.modules) * rows
    if up[adapted:].any():
        raise ValueError(
            f"{key} changes rows from {adapted} on: it adapts the MLP, which this run does not; expected zeros there. "
            "Choose a LoRA of the attention alone"
        )
    return torch.split(up[:adapted], rows)
