"""Parts of a model from files that are not in diffusers format, read by diffusers' own conversions.

These are the original files of a model's authors, ComfyUI's, with their prefixes, and files with FP8 weights.
"""

import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from solrl_core.families.part_files import components, part_class, weights_of
from solrl_core.rewards.loading import listed, read_checkpoint

logger = logging.getLogger(__name__)

Tensors = dict[str, Tensor]

_PREFIXES = {"model.diffusion_model.": "transformer", "first_stage_model.": "vae", "vae.": "vae"}
_FLOAT8 = "F8_"
_SCALES = (".scale_weight", ".weight_scale")
# For FP8 arithmetic, training and ComfyUI: no part has them.
_SPARE = (".scale_input", ".input_scale", "scaled_fp8", "logit_scale", "position_ids", "model_sampling.sigmas")
_SHOWN = 3
_SANA = "SanaTransformer2DModel"
"""Its files may have 1×1 convolutions as linear layers, whatever their names."""
_NORM_OF_SANA = re.compile(r"^blocks\.(\d+)\.(attn|cross_attn)\.([qk])_norm\.")
"""SANA 1.5's weights that diffusers' conversion leaves unchanged."""


def parts_in(file: Path, encoders: Sequence[str]) -> Collection[str]:
    """Parts of the pipeline whose weights a checkpoint of one part, or of several with their prefixes, has.

    `encoders` are names of the text encoders in such files, in the pipeline's order. Only the header is read.

    Raises:
        OSError: it cannot be read, or has no transformer.
    """
    by_part = _by_part(_types(file), encoders)
    if "transformer" not in by_part:
        raise OSError(f"{file} has weights of {', '.join(by_part) or 'nothing'}; expected a file with a transformer")
    return by_part.keys()


def parts_of_file(
    file: Path, folder: Path, index: Mapping[str, Any], encoders: Sequence[str], dtype: torch.dtype
) -> dict[str, nn.Module]:
    """The parts that a checkpoint has, by the configurations in a folder.

    Raises:
        OSError: it cannot be read, or it does not fit; names what is missing or unexpected.
    """
    kinds, weights = components(index), _read([file])
    return {
        part: _load(kinds[part], folder / part, {new: weights.pop(old) for new, old in names.items()}, dtype, file)
        for part, names in _by_part(weights, encoders).items()
        if part in kinds
    }


def parts_by_content(
    folder: Path, index: Mapping[str, Any], external: Collection[str], dtype: torch.dtype
) -> dict[str, nn.Module]:
    """The parts of a folder whose file has another name than diffusers expects, or has FP8 weights; and all of SANA.

    Raises:
        OSError: a file cannot be read, or does not fit; the message names what is missing or unexpected.
    """
    modules = {}
    for part, kind in components(index).items():
        files, _, named = weights_of(folder / part)
        usual = (
            named
            and kind[1] != _SANA  # whose file may be a pickle
            and not any(type_.startswith(_FLOAT8) for file in files for type_ in _types(file).values())
        )
        if part not in external and files and not usual:
            weights = {name.removeprefix("model.diffusion_model."): tensor for name, tensor in _read(files).items()}
            modules[part] = _load(kind, folder / part, weights, dtype, files[0])
    return modules


def _by_part(names: Iterable[str], encoders: Sequence[str]) -> dict[str, dict[str, str]]:
    """Part → name in it → name in the file. Names without a known prefix are the transformer's."""
    prefixes = _PREFIXES | {
        f"text_encoders.{name}.transformer.": f"text_encoder_{index}" if index > 1 else "text_encoder"
        for index, name in enumerate(encoders, 1)
    }
    by_part: dict[str, dict[str, str]] = {}
    for name in names:
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), "")
        by_part.setdefault(prefixes.get(prefix, "transformer"), {})[name.removeprefix(prefix)] = name
    return by_part


def _types(file: Path) -> dict[str, str]:
    """Name → type of a safetensors file's tensors, from its header."""
    try:
        with safe_open(file, framework="pt") as opened:
            names = [name for name in opened.keys() if not name.endswith(_SPARE)]  # noqa: SIM118
            return {name: opened.get_slice(name).get_dtype() for name in names}
    except (SafetensorError, FileNotFoundError) as error:
        raise OSError(f"cannot read {file}: {error}; expected a whole safetensors file: copy it again") from error


def _read(files: Sequence[Path]) -> Tensors:
    """The tensors of files; FP8 tensors as BF16 values, times the scale of the tensor or its rows if there is one."""
    weights: Tensors = {}
    for file in files:
        try:
            read = read_checkpoint(str(file))
        except ValueError as error:
            raise OSError(str(error)) from error
        weights |= {name: weight for name, weight in read.items() if not name.endswith(_SPARE)}
    narrow = [name for name, weight in weights.items() if weight.is_floating_point() and weight.itemsize == 1]
    for name in narrow:
        weight = weights[name]
        scales = (weights.pop(name.removesuffix(".weight") + end, None) for end in _SCALES)
        if (scale := next((tensor for tensor in scales if tensor is not None), None)) is not None:
            weight = weight.float() * scale.float().reshape(-1, *(1,) * (weight.ndim - 1))
        weights[name] = weight.bfloat16()
    if narrow:
        logger.warning(f"{files[0]}: {len(narrow)} FP8 weights are loaded as their BF16 values")
    return weights


def _load(kind: tuple[str, str], folder: Path, weights: Tensors, dtype: torch.dtype, file: Path) -> nn.Module:
    library, name = kind
    cls = part_class(library, name)
    if library == "diffusers":
        return _of_diffusers(cls, folder, weights, dtype, file)
    config = cls.config_class.from_pretrained(folder)
    model, report = cls.from_pretrained(
        None, config=config, state_dict=weights, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
    )
    # CLIP's projection is in files of the whole CLIP, and unused by a bare encoder.
    unexpected = {key for key in report["unexpected_keys"] if not key.endswith("text_projection.weight")}
    _check(cls, file, folder, report["missing_keys"], unexpected, [key for key, *_ in report["mismatched_keys"]])
    module: nn.Module = model
    return module


def _of_diffusers(cls: Any, folder: Path, weights: Tensors, dtype: torch.dtype, file: Path) -> nn.Module:
    import diffusers
    from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
    from diffusers.utils import logging as logging_of_diffusers

    rows = SINGLE_FILE_LOADABLE_CLASSES.items()
    row = next((row for name, row in rows if issubclass(cls, getattr(diffusers, name, ()))), None)
    if row is None:
        raise OSError(
            f"{file}: diffusers {diffusers.__version__} cannot read a single file for {cls.__name__}; expected a "
            "folder in diffusers format"
        )
    config = cls.load_config(folder)
    with torch.device("meta"):
        expected = {name: tensor.shape for name, tensor in cls.from_config(config).state_dict().items()}
    weights = {name.replace("_conv.linear.", "_conv.conv."): weight for name, weight in weights.items()}  # of SANA
    before = list(weights)
    converted = weights
    if weights.keys() != expected.keys():
        try:
            converted = row["checkpoint_mapping_fn"](checkpoint=weights, config=config)
        except (KeyError, IndexError, RuntimeError) as error:
            what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise OSError(
                f"{file} does not have the layout of a {cls.__name__}: {what}; its first tensors are "
                f"{listed(before, _SHOWN)}; expected the original or ComfyUI's file of the model in {folder.parent}"
            ) from error
    for name in [name for name in weights if _NORM_OF_SANA.match(name)]:
        new = _NORM_OF_SANA.sub(r"transformer_blocks.\1.\2.norm_\3.", name)
        converted[new.replace("cross_attn.", "attn2.").replace(".attn.", ".attn1.")] = weights.pop(name)
    for name in converted.keys() & expected.keys():
        if converted[name].ndim == 2 and expected[name][2:] == (1, 1):
            converted[name] = converted[name][..., None, None]
    # Most conversions take what they know out of `weights`.
    unconverted = () if len(weights) == len(before) or converted is weights else weights
    resized = [name for name in converted if name in expected and converted[name].shape != expected[name]]
    _check(cls, file, folder, expected.keys() - converted.keys(), {*unconverted, *converted} - expected.keys(), resized)
    level = logging_of_diffusers.get_verbosity()
    logging_of_diffusers.set_verbosity_error()  # it warns of modules to keep in float32 where there are none
    try:
        module: nn.Module = cls.from_single_file(converted, config=str(folder), torch_dtype=dtype)
    finally:
        logging_of_diffusers.set_verbosity(level)
    return module


def _check(
    cls: Any, file: Path, folder: Path, missing: Iterable[str], unexpected: Iterable[str], resized: Iterable[str]
) -> None:
    kinds = {"lacks": list(missing), "also has": list(unexpected), "has in another shape": list(resized)}
    faults = [f"{verb} {listed(names, _SHOWN)}" for verb, names in kinds.items() if names]
    if faults:
        raise OSError(
            f"{file} does not fit {cls.__name__} of {folder / 'config.json'}: it {'; it '.join(faults)}; expected a "
            "complete file, and the folder of the same model"
        )
