"""LoRAs by the layer names of a transformer's authors, which ComfyUI and kohya's trainers use.

Where the authors fuse layers that diffusers has apart, such as q, k and v, the fused layer's lora_B is block-diagonal.
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
    return OriginalLayer(name, tuple(f"{block}.{module}" for module in names), further)


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
            *(f"attn.{layer}" for layer in (*_QKV, "to_out.0", *_ADDED, "to_add_out")),
            *(f"{stream}_mlp.net.{layer}" for stream in ("img", "txt") for layer in ("0.proj", "2")),
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
    places = {name: (layer, index) for layer in ORIGINAL_LAYERS[family] for index, name in enumerate(layer.modules)}
    by_layer: dict[str, tuple[OriginalLayer, dict[int, str]]] = {}
    for module in adapter.modules:
        number = _NUMBER.search(module)
        place = places.get(_NUMBER.sub("{}", module, count=1))
        if number is None or place is None:
            raise ValueError(f"the layout of {layout} has no name for {module} of the family {family}")
        layer, index = place
        by_layer.setdefault(layer.name.format(number[0]), (layer, {}))[1][index] = module
    tensors = {}
    for name, (layer, parts) in by_layer.items():
        key = f"diffusion_model.{name}" if layout == "comfyui" else f"lora_unet_{name.replace('.', '_')}"
        downs = [adapter.tensors[lora_a_key(parts[index])] for index in sorted(parts)]
        ups = [adapter.tensors[lora_b_key(parts[index])] for index in sorted(parts)]
        rows, rank = len(ups[0]), adapter.rank
        up_blocks = torch.zeros((len(layer.modules) + layer.further) * rows, rank * len(parts))
        for column, (index, up) in enumerate(zip(sorted(parts), ups, strict=True)):
            up_blocks[index * rows : (index + 1) * rows, column * rank : (column + 1) * rank] = up
        tensors[f"{key}.lora_down.weight"] = torch.cat(downs)
        tensors[f"{key}.lora_up.weight"] = up_blocks
        tensors[f"{key}.alpha"] = torch.tensor(adapter.alpha * len(parts))
    file: bytes = safetensors.torch.save(tensors, metadata={"format": "pt"})
    return file
