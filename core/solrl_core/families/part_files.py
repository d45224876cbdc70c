"""A model's parts on disk: their classes, which files hold their weights, and which are missing. Reads no weights."""

import importlib
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from solrl_proto.text_files import read_json

_STEM = r"(?:diffusion_pytorch_model|model)"
_SINGLE = re.compile(rf"{_STEM}(?:\.(?P<variant>\w+))?\.safetensors")
_INDEX = re.compile(rf"{_STEM}\.safetensors\.index(?:\.(?P<variant>\w+))?\.json")
_SHARD = re.compile(rf"(?P<stem>{_STEM})(?:\.(?P<variant>\w+))?-\d+-of-\d+\.safetensors")
_OTHER = (".safetensors", ".pth", ".pt")
"""Ends of the files that need no name of diffusers or transformers."""
_LIBRARIES = ("diffusers", "transformers")
_BASES = {
    "diffusers": ("ModelMixin", "SchedulerMixin"),
    "transformers": ("PreTrainedModel", "PreTrainedTokenizerBase", "FeatureExtractionMixin", "ImageProcessingMixin"),
}
"""Library → the classes whose subclasses load a part. A pipeline would read a model_index.json of its own."""
_COUNT = re.compile(r"(num|n)_(\w+_)?(layers|blocks)|layers_per_block|depth|layers")
_MOST_LAYERS = 1000
_LARGEST = 2**24


class ModelFileError(ValueError):
    """A model's folder cannot be used, whatever loads it; the message has the reason and advice."""


class Weights(NamedTuple):
    """Files of one part's weights.

    Attributes:
        files: files to read. Files that an index lists may be missing. Empty for pickled files of the usual names.
        variant: diffusers' name of the variant, such as fp16; None for the usual names.
        named: whether diffusers and transformers find them by their names.
    """

    files: tuple[Path, ...] = ()
    variant: str | None = None
    named: bool = True


def read_index(folder: Path) -> dict[str, Any]:
    """The model_index.json of a folder, whose parts have configurations of plausible sizes.

    Raises:
        OSError: it cannot be read.
        ModelFileError: the index names no usable parts; a configuration is no object, or has a number that would take
            hours to build.
        TextFileError: a file is not JSON.
    """
    index = _read_object(folder / "model_index.json")
    paths = [folder / part / file for part in components(index) for file in ("config.json", "scheduler_config.json")]
    for path in filter(Path.is_file, paths):
        for name, number in _numbers(_read_object(path)):
            largest = _MOST_LAYERS if _COUNT.fullmatch(name) else _LARGEST
            if abs(number) > largest and "theta" not in name:
                raise ModelFileError(
                    f"{path}: got {name} = {number:.6g}; expected at most {largest}: get the file again from the "
                    "model's authors"
                )
    return index


def _read_object(path: Path) -> dict[str, Any]:
    content = read_json(path)
    if not isinstance(content, dict):
        raise ModelFileError(f"{path}: got {type(content).__name__}; expected a JSON object")
    return content


def _numbers(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Key → whole number of a configuration, at any depth."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _numbers(value)
        else:
            values = value if isinstance(value, list) else [value]
            yield from ((name, number) for number in values if isinstance(number, int))


def components(index: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Part → (library, class) of a model_index.json, without the parts that the model does not have.

    Raises:
        ModelFileError: a library is none of diffusers and transformers: a model must not choose what is imported.
    """
    # diffusers takes all that has two items for a part.
    pairs = (
        (name, list(value)) for name, value in index.items() if isinstance(value, list | str | dict) and len(value) == 2
    )
    parts = {}
    for name, (library, kind) in pairs:
        if library is None or kind is None or name.startswith("_"):
            continue
        if library not in _LIBRARIES or not isinstance(kind, str):
            raise ModelFileError(
                f"model_index.json has the part {name} of {library!r}, {kind!r}; expected a library of "
                f"{' or '.join(_LIBRARIES)} and its class. Nothing else is imported, since its code would run: choose "
                "another model"
            )
        parts[name] = (library, kind)
    return parts


def part_class(library: str, kind: str) -> Any:
    """The class of a part, as `components` names it.

    Raises:
        ModelFileError: the library has no such class, or the class loads no single part.
    """
    module = importlib.import_module(library)
    cls, bases = getattr(module, kind, None), _BASES[library]
    bases_found = tuple(base for name in bases if (base := getattr(module, name, None)) is not None)
    if not isinstance(cls, type) or not issubclass(cls, bases_found):
        raise ModelFileError(
            f"model_index.json names {kind} of {library} {module.__version__}; expected a subclass of "
            f"{' or '.join(bases)} that this version has"
        )
    return cls


def weights_of(part: Path) -> Weights:
    """Files of the weights in the folder of a part. Usual names come before variants, and these before other names."""
    names = sorted(path.name for path in part.glob("*") if path.is_file())
    matched = [match for name in names if (match := _SINGLE.fullmatch(name) or _INDEX.fullmatch(name))]
    if matched:
        first = min(matched, key=lambda match: (match["variant"] or "", match.re is _INDEX))
        files = {first[0]} if first.re is _SINGLE else set(read_json(part / first[0])["weight_map"].values())
        return Weights(tuple(part / name for name in sorted(files)), first["variant"])
    unnamed = [part / name for name in names if name.endswith(_OTHER) and not _SHARD.fullmatch(name)]
    return Weights(tuple(unnamed), named=False) if len(unnamed) == 1 else Weights()


def missing_files(folder: Path, external: Collection[str] = ()) -> list[str]:
    """Missing files that the model in a folder in diffusers format needs, relative to the folder.

    The weights of `external` parts come from elsewhere.
    """
    parts = components(read_index(folder))
    return [
        f"{name}/{file}"
        for name, (library, _) in parts.items()
        for file in missing_in(folder / name, library, name in external)
    ]


def missing_in(part: Path, library: str = "transformers", external: bool = False) -> list[str]:
    """Missing files of one part, "" for its folder. A part with `external` weights needs only its configuration."""
    names = {path.name for path in part.glob("*") if path.exists()}
    files = weights_of(part).files
    if "config.json" not in names:
        # Tokenizers and schedulers have none.
        return ["config.json"] if external or files else [] if names else [""]
    if external or files or any(name.endswith(".bin") for name in names):
        return [] if external else [file.name for file in files if file.name not in names]
    if shard := next((match for name in sorted(names) if (match := _SHARD.fullmatch(name))), None):
        return [f"{shard['stem']}.safetensors.index.{shard['variant'] + '.' if shard['variant'] else ''}json"]
    return [f"{'diffusion_pytorch_model' if library == 'diffusers' else 'model'}.safetensors"]


def variant_of(folder: Path, index: Mapping[str, Any], external: Collection[str]) -> str | None:
    """The variant that the weights of a folder have, such as fp16, if there is a part without usual names."""
    variants = (weights_of(folder / part).variant for part in components(index) if part not in external)
    return next(filter(None, variants), None)
