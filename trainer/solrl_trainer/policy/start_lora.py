"""An existing LoRA from which a run starts, read from the layouts of diffusers, PEFT, ComfyUI and kohya."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from solrl_core.adapter import Adapter, lora_a_key, lora_b_key
from solrl_core.families.original_layers import from_layout
from solrl_core.families.pipeline import PipelineBackbone
from solrl_proto.text_files import read_json
from torch import Tensor

_FILES = ("adapter_model.safetensors", "lora.safetensors", "pytorch_lora_weights.safetensors")
_PEFT = "base_model.model."
_PART = re.compile(r"(?:transformer\.)?(.+?)\.(?:lora_(A|B)(?:\.default)?\.weight|(alpha))")
_SHOWN = 3


def find_start(path: Path) -> Path:
    """The file of a LoRA: `path`, or the one of the usual name in that folder.

    Raises:
        ValueError: there is none.
    """
    found = next((file for file in (path, *(path / name for name in _FILES)) if file.is_file()), None)
    if found is None:
        raise ValueError(f"got start_lora={path}; expected a file, or a folder with {' or '.join(_FILES)}")
    return found


def read_start(path: Path, backbone: PipelineBackbone, initial: Adapter) -> dict[str, Tensor]:
    """Weights by PEFT key with which an adapter makes the change of a file, of at most its rank.

    Modules that the file lacks keep the weights of `initial`, the run's adapter before its first step, which change
    nothing, and so do further ranks. `path` is as for `find_start`.

    Raises:
        ValueError: the file is no LoRA of these modules, or has a higher rank; says what to do.
        OSError: it cannot be read.
    """
    file = find_start(path)
    try:
        with safe_open(file, "pt") as opened:
            metadata: dict[str, str] = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name).float() for name in opened.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{file} is no safetensors file: {error}") from error
    try:
        known = from_layout(tensors, backbone.family)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    modules = _modules(_in_diffusers_layout(tensors, backbone, file) if known is None else known, file)
    own = set(initial.modules)
    if foreign := sorted(set(modules) - own):
        shown = ", ".join(foreign[:_SHOWN])
        raise ValueError(
            f"{file} adapts {len(foreign)} modules that this run does not, such as {shown}; expected some of the run's "
            f"{len(own)}, such as {min(own)}: a LoRA of this model's transformer alone"
        )
    default = _alpha(metadata, file) if known is None else None  # from_layout has applied alpha
    weights = dict(initial.tensors)
    for module, parts in modules.items():
        a, b = parts["A"], parts["B"]
        rank = a.shape[0]
        if rank > initial.rank:
            raise ValueError(f"{file} has rank {rank} at {module}; expected --set lora.rank={rank} or more")
        whole_a, whole_b = weights[lora_a_key(module)].clone(), weights[lora_b_key(module)].clone()
        if a.shape[1] != whole_a.shape[1] or b.shape != (whole_b.shape[0], rank):
            raise ValueError(
                f"{file} has {tuple(b.shape)} · {tuple(a.shape)} at {module}; expected a change of "
                f"{(whole_b.shape[0], whole_a.shape[1])}: a LoRA of another model"
            )
        alpha = float(parts.get("alpha", rank if default is None else default))
        whole_a[:rank], whole_b[:, :rank] = a, b * (alpha / rank / initial.scale)
        weights |= {lora_a_key(module): whole_a, lora_b_key(module): whole_b}
    return weights


def _in_diffusers_layout(tensors: dict[str, Tensor], backbone: PipelineBackbone, file: Path) -> Mapping[str, Tensor]:
    if all(name.startswith(_PEFT) for name in tensors):
        return {name.removeprefix(_PEFT): tensor for name, tensor in tensors.items()}
    if all(_PART.fullmatch(name) for name in tensors):
        return tensors
    pipeline: Any = type(backbone.pipeline)  # which converts some of kohya's files
    try:
        converted = pipeline.lora_state_dict(tensors)
    except (ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"{file} is in a layout that {pipeline.__name__} does not convert: {error}") from error
    return dict(converted)


def _modules(tensors: Mapping[str, Tensor], file: Path) -> dict[str, dict[str, Tensor]]:
    """Module → its A, B and alpha."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if (match := _PART.fullmatch(name)) is None:
            raise ValueError(f"{file} has {name}; expected lora_A, lora_B and alpha of the transformer's modules alone")
        found.setdefault(match[1], {})[match[2] or match[3]] = tensor
    if not found:
        raise ValueError(f"{file} has no tensors; expected lora_A and lora_B of some modules")
    if half := next((module for module, parts in found.items() if not {"A", "B"} <= parts.keys()), None):
        raise ValueError(f"{file} has one of lora_A and lora_B of {half}; expected both")
    return found


def _alpha(metadata: Mapping[str, str], file: Path) -> float | None:
    """Alpha of all modules, of the file's metadata or of PEFT's adapter_config.json beside it; None: the rank."""
    if "lora_alpha" in metadata:
        return float(metadata["lora_alpha"])
    if (text := metadata.get("lora_adapter_metadata")) is not None:
        alpha = json.loads(text).get("transformer.lora_alpha")
        return None if alpha is None else float(alpha)
    config = file.with_name("adapter_config.json")
    return float(read_json(config)["lora_alpha"]) if file.name == _FILES[0] and config.is_file() else None
