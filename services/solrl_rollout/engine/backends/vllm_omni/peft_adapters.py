"""Adapters as PEFT folders for vLLM-Omni."""

import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from solrl_core.adapter import Adapter, lora_a_key, lora_b_key

PACKED = {
    "to_qkv": ("to_q", "to_k", "to_v"),
    "add_kv_proj": ("add_q_proj", "add_k_proj", "add_v_proj"),
}
"""Fused projection → the checkpoint's projections, in the order of its slices."""

_SHARED_MEMORY = Path("/dev/shm")


def adapter_number(digest: str) -> int:
    """vLLM-Omni's name of an adapter: the first 63 bits of its digest; never 0, which is not allowed."""
    return (int(digest.removeprefix("sha256:")[:16], 16) >> 1) or 1


@contextmanager
def peft_folder(adapter: Adapter, *, output: str) -> Iterator[Path]:
    """A PEFT folder with an adapter, in shared memory if there is any; removed at the end.

    `output` is vLLM-Omni's name of attention's output projection, which is to_out.0 in the adapter.

    The scale is multiplied into lora_B in float32, before vLLM-Omni rounds both to bfloat16.

    Raises:
        ValueError: a weight overflows in bfloat16.
    """
    tensors = {}
    names = {module: re.sub(r"\bto_out\.0$", output, module) for module in adapter.modules}
    for module, name in names.items():
        tensors[lora_a_key(name)] = adapter.tensors[lora_a_key(module)].contiguous()
        tensors[lora_b_key(name)] = (adapter.tensors[lora_b_key(module)] * adapter.scale).contiguous()
    for key, tensor in tensors.items():
        if not torch.isfinite(tensor.bfloat16()).all():
            raise ValueError(f"{key} would not be finite in bfloat16; nothing was changed")
    config = {
        "peft_type": "LORA",
        "r": adapter.rank,
        "lora_alpha": adapter.rank,
        "target_modules": sorted({_ending(name) for name in names.values()}),
        "bias": "none",
    }
    place = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="solrl-adapter-", dir=place) as folder:
        (Path(folder) / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
        save_file(tensors, Path(folder) / "adapter_model.safetensors")
        yield Path(folder)


def _ending(module: str) -> str:
    """End of a module's name, such as to_q or to_out.0: vLLM-Omni matches each one with each layer."""
    parent, _, last = module.rpartition(".")
    return f"{parent.rpartition('.')[2]}.{last}" if last.isdigit() else last
