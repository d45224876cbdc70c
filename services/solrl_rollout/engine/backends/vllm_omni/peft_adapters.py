"""Adapters as PEFT folders for vLLM-Omni, and the modules that it really bound.

vLLM-Omni accepts an adapter that binds nothing, and then answers with the images of the base model. So the weights are
looked up in its layers after loading.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file, save_file
from solrl_core.adapter import Adapter, lora_a_key, lora_b_key

PACKED = {
    "to_qkv": ("to_q", "to_k", "to_v"),
    "add_kv_proj": ("add_q_proj", "add_k_proj", "add_v_proj"),
}
"""Fused projection → the checkpoint's projections, in the order of its slices."""

_SHARED_MEMORY = Path("/dev/shm")
_WEIGHTS = "adapter_model.safetensors"


class LoraLayer(Protocol):
    """A layer of vLLM-Omni with room for an adapter.

    Attributes:
        lora_a_stacked: per slice, float [1, 1, largest rank, in_features / tensor-parallel size].
        tp_rank: place among the processes that share the layer.
    """

    lora_a_stacked: Sequence[torch.Tensor]
    tp_rank: int


def adapter_number(digest: str) -> int:
    """vLLM-Omni's name of an adapter: the first 63 bits of its digest; never 0, which is not allowed."""
    return (int(digest.removeprefix("sha256:")[:16], 16) >> 1) or 1


@contextmanager
def peft_folder(adapter: Adapter) -> Iterator[Path]:
    """A PEFT folder with an adapter, in shared memory if there is any; removed at the end.

    The scale is multiplied into lora_B in float32, before vLLM-Omni rounds both to bfloat16.

    Raises:
        ValueError: a weight overflows in bfloat16.
    """
    tensors = {}
    for module in adapter.modules:
        tensors[lora_a_key(module)] = adapter.tensors[lora_a_key(module)].contiguous()
        tensors[lora_b_key(module)] = (adapter.tensors[lora_b_key(module)] * adapter.scale).contiguous()
    for key, tensor in tensors.items():
        if not torch.isfinite(tensor.bfloat16()).all():
            raise ValueError(f"{key} would not be finite in bfloat16; nothing was changed")
    config = {
        "peft_type": "LORA",
        "r": adapter.rank,
        "lora_alpha": adapter.rank,
        "target_modules": sorted({_ending(module) for module in adapter.modules}),
        "bias": "none",
    }
    place = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="solrl-adapter-", dir=place) as folder:
        (Path(folder) / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        save_file(tensors, Path(folder) / _WEIGHTS)
        yield Path(folder)


def bound_modules(layers: Mapping[str, LoraLayer], folder: Path) -> list[str]:
    """Modules of a PEFT folder's adapter whose lora_A is in the layers, sorted.

    Args:
        layers: the engine's layers by name, `transformer.` included.
        folder: the PEFT folder.
    """
    tensors = load_file(folder / _WEIGHTS)
    bound = []
    for name, layer in layers.items():
        parent, _, last = name.partition(".")[2].rpartition(".")
        for part, buffer in zip(PACKED.get(last, (last,)), layer.lora_a_stacked, strict=False):
            module = f"{parent}.{part}"
            if (lora_a := tensors.get(lora_a_key(module))) is not None and _holds(buffer[0, 0], lora_a, layer.tp_rank):
                bound.append(module)
    return sorted(bound)


def _ending(module: str) -> str:
    """End of a module's name, such as to_q or to_out.0: vLLM-Omni matches each one with each layer."""
    parent, _, last = module.rpartition(".")
    return f"{parent.rpartition('.')[2]}.{last}" if last.isdigit() else last


def _holds(buffer: torch.Tensor, lora_a: torch.Tensor, rank: int) -> bool:
    """Whether a buffer holds lora_A, or this process's columns of a layer that several processes share."""
    width = buffer.shape[1]
    first = 0 if width == lora_a.shape[1] else rank * width
    columns = lora_a[:, first : first + width].to(buffer)
    return columns.shape[1] == width and torch.equal(buffer[: len(columns)], columns)
