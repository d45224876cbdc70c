"""An existing LoRA as the start of a run, read from the layouts of diffusers, PEFT, ComfyUI and kohya."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from solrl_core.adapter import Adapter, lora_a_key, lora_b_key
from solrl_core.families.lora_layouts import FileLayer, by_module, read_layers
from solrl_core.families.pipeline import PipelineBackbone
from solrl_proto.text_files import parse_json, read_text
from torch import Tensor

_FILES = ("adapter_model.safetensors", "lora.safetensors", "pytorch_lora_weights.safetensors")
_CONFIG = "adapter_config.json"
_DIFFUSERS = "lora_adapter_metadata"
_STARTS = (True, False, None, "gaussian", "orthogonal")
"""Values of `init_lora_weights` that leave the model unaltered, so that A and B alone are the change."""
_SCALING = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "init_lora_weights")
_WITHOUT_EFFECT = {
    *(
        "peft_type",
        "task_type",
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
    ),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout", "fan_in_fan_out"),
    *("eva_config", "corda_config", "loftq_config", "lora_ga_config", "qalora_group_size", "runtime_config"),
    *("megatron_config", "megatron_core"),
}
"""Fields of PEFT's LoraConfig that do not matter to a finished adapter of linear layers."""

Scale = Callable[[FileLayer], float]


class StartLora(NamedTuple):
    """First weights of a run, by PEFT key for all modules, and a line on the layers read and their alpha."""

    weights: dict[str, Tensor]
    summary: str


def find_start(path: Path) -> Path:
    """The file of a LoRA: `path`, or the one of the usual name in that folder; a ValueError if there is none."""
    start = next((file for file in (path, *(path / name for name in _FILES)) if file.is_file()), None)
    if start is None:
        raise ValueError(f"got start_lora={path}; expected a file, or a folder with {' or '.join(_FILES)}")
    return start


def read_start(path: Path, backbone: PipelineBackbone, initial: Adapter) -> StartLora:
    """Weights of an adapter that make a file's change, of at most the adapter's rank.

    Modules that the file lacks keep the weights of `initial`, the run's adapter before its first step, which change
    nothing, and so do further ranks. `path` is as for `find_start`.

    Raises:
        ValueError: the file is no plain LoRA of these modules, changes nothing, or has a higher rank; says what to do.
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
        layers = read_layers(tensors)
        scale, source = _scales(layers, metadata, file)
        scaled = [replace(layer, b=layer.b * scale(layer)) for layer in layers]
        changes = by_module(scaled, backbone.family, initial.modules)
        weights = dict(initial.tensors)
        for module, (a, b) in changes.items():
            rank = len(a)
            if rank > initial.rank:
                raise ValueError(f"has rank {rank} at {module}; expected --set lora.rank={rank} or more")
            whole_a, whole_b = weights[lora_a_key(module)].clone(), weights[lora_b_key(module)].clone()
            if a.shape[1] != whole_a.shape[1] or len(b) != len(whole_b):
                raise ValueError(
                    f"has {tuple(b.shape)} · {tuple(a.shape)} at {module}; expected a change of "
                    f"{(len(whole_b), whole_a.shape[1])}: a LoRA of another model"
                )
            whole_a[:rank], whole_b[:, :rank] = a, b / initial.scale
            weights |= {lora_a_key(module): whole_a, lora_b_key(module): whole_b}
        read = sum(bool(change.a.any()) for change in changes.values())
        if not read:
            raise ValueError(f"changes none of its {len(changes)} modules: B or alpha is zero; expected a trained LoRA")
    except ValueError as error:
        raise ValueError(f"{file} {error}") from error
    total = len(initial.modules)
    return StartLora(
        weights,
        f"starting from {file}: {read} of {total} layers read, {total - len(changes)} left as they are, "
        f"{len(changes) - read} unchanged by zeros in it; alpha {source}",
    )


def _scales(layers: list[FileLayer], metadata: Mapping[str, str], file: Path) -> tuple[Scale, str]:
    """The scale of each layer, and where alpha is from. An alpha beside a layer wins."""
    general, source = _general_scale(metadata, file)
    alone = sum(layer.alpha is not None for layer in layers)
    if alone == len(layers):
        source = "of each layer"
    elif alone:
        source = f"of each of {alone} layers, else {source}"

    def scale(layer: FileLayer) -> float:
        return general(layer) if layer.alpha is None else layer.alpha / layer.rank

    return scale, source


def _general_scale(metadata: Mapping[str, str], file: Path) -> tuple[Scale, str]:
    config = file.with_name(_CONFIG)
    if "lora_alpha" in metadata:
        place = "of lora_alpha in its header"
        values: Any = {"lora_alpha": metadata["lora_alpha"]}
    elif _DIFFUSERS in metadata:
        place = f"of {_DIFFUSERS} in its header"
        values = parse_json(metadata[_DIFFUSERS], place)
        if isinstance(values, dict) and any(name.startswith("transformer.") for name in values):
            parts = (name.partition(".") for name in values)
            values = {name: values[f"transformer.{name}"] for part, _, name in parts if part == "transformer"}
    elif file.name == _FILES[0] and config.is_file():
        place = f"of {_CONFIG} beside it"
        values = parse_json(read_text(config), config)
    else:
        trained = metadata.get("ss_network_alpha")
        unused = f" (ss_network_alpha={trained} of its header is not used)" if trained else ""
        return (lambda _: 1.0), f"taken to be the rank, as ComfyUI and diffusers do without one{unused}"
    return _scale_of_peft(values, place), place


def _scale_of_peft(values: Any, place: str) -> Scale:
    """The scale of a layer by settings of PEFT; ValueError if they are not understood, or no plain LoRA's."""
    from peft import LoraConfig
    from peft.utils.other import get_pattern_key

    if not isinstance(values, dict):
        raise ValueError(f"has settings {place} that are no JSON object")
    if (kind := values.get("peft_type") or "LORA") != "LORA":
        raise ValueError(f"is a {kind} by peft_type {place}; expected LORA")
    defaults = vars(LoraConfig())
    for name in sorted(values.keys() - _WITHOUT_EFFECT - set(_SCALING)):
        if values[name] and values[name] != defaults.get(name):
            raise ValueError(f"has {name}={values[name]!r} {place}; expected a plain LoRA, without it")
    if values.get("init_lora_weights") not in _STARTS:
        raise ValueError(
            f"has init_lora_weights={values['init_lora_weights']!r} {place}, which may alter the model's weights, too; "
            "expected a change of the unaltered model: save it by save_pretrained with "
            "path_initial_model_for_weight_conversion, and init_lora_weights=true"
        )
    try:
        config = LoraConfig(**{name: values[name] for name in _SCALING if values.get(name) is not None})
        general = float(config.lora_alpha)
    except (TypeError, ValueError) as error:
        raise ValueError(f"has settings {place} that PEFT does not take: {error}") from error

    def of_layer(pattern: dict[str, Any], name: str, otherwise: float) -> float:
        try:
            return float(pattern.get(get_pattern_key(list(pattern), name), otherwise))
        except (AttributeError, TypeError, ValueError, re.error) as error:
            raise ValueError(f"has the pattern {pattern!r} {place}, which PEFT cannot apply: {error}") from error

    def scale(layer: FileLayer) -> float:
        rank, alpha = (
            of_layer(config.rank_pattern, layer.name, config.r),
            of_layer(config.alpha_pattern, layer.name, general),
        )
        if "r" in values and rank != layer.rank:
            raise ValueError(f"has rank {layer.rank} at {layer.name}, but {rank:g} {place}: one is of another file")
        if not math.isfinite(alpha):
            raise ValueError(f"has alpha {alpha} for {layer.name} {place}; expected a finite number")
        return alpha / (math.sqrt(layer.rank) if config.use_rslora else layer.rank)

    return scale
