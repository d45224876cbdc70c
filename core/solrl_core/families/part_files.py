"""Weights of a model's parts on disk: which files hold them, and which are missing. Reads no weights."""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from solrl_proto.text_files import read_json

_STEM = r"(?:diffusion_pytorch_model|model)"
_SINGLE = re.compile(rf"{_STEM}(?:\.(?P<variant>\w+))?\.safetensors")
_INDEX = re.compile(rf"{_STEM}\.safetensors\.index(?:\.(?P<variant>\w+))?\.json")
_SHARD = re.compile(rf"(?P<stem>{_STEM})(?:\.(?P<variant>\w+))?-\d+-of-\d+\.safetensors")
_OTHER = (".safetensors", ".pth", ".pt")
"""Ends of the files that need no name of diffusers or transformers."""


class Weights(NamedTuple):
    """Files of one part's weights.

    Attributes:
        files: those that are read; those of an index may be missing. Empty for pickled ones of the usual names.
        variant: as diffusers calls it, such as fp16; None for the usual names.
        named: whether diffusers and transformers find them by their names.
    """

    files: tuple[Path, ...] = ()
    variant: str | None = None
    named: bool = True


def parts_of(index: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Part → (library, class) of a model_index.json, without the parts that the model does not have."""
    found = ((name, value) for name, value in index.items() if isinstance(value, list) and len(value) == 2)
    return {name: (library, kind) for name, (library, kind) in found if library is not None and kind is not None}


def weights_of(part: Path) -> Weights:
    """Files of the weights in the folder of a part. Usual names come before variants, and these before other names."""
    names = sorted(path.name for path in part.glob("*") if path.is_file())
    matched = [found for name in names if (found := _SINGLE.fullmatch(name) or _INDEX.fullmatch(name))]
    if matched:
        first = min(matched, key=lambda found: (found["variant"] or "", found.re is _INDEX))
        files = {first[0]} if first.re is _SINGLE else set(read_json(part / first[0])["weight_map"].values())
        return Weights(tuple(part / name for name in sorted(files)), first["variant"])
    others = [part / name for name in names if name.endswith(_OTHER) and not _SHARD.fullmatch(name)]
    return Weights(tuple(others), named=False) if len(others) == 1 else Weights()


def missing_files(folder: Path, given: Collection[str] = ()) -> list[str]:
    """Files without which the model in a folder cannot be loaded, relative to it.

    Args:
        folder: in diffusers format, with a model_index.json.
        given: parts whose weights come from elsewhere.
    """
    parts = parts_of(read_json(folder / "model_index.json"))
    return [
        f"{name}/{file}"
        for name, (library, _) in parts.items()
        for file in missing_in(folder / name, library, name in given)
    ]


def missing_in(part: Path, library: str = "transformers", given: bool = False) -> list[str]:
    """Missing files of one part, of which only the configuration is needed if it is `given`; "" for its folder."""
    names = {path.name for path in part.glob("*") if path.exists()}
    files = weights_of(part).files
    if "config.json" not in names:
        # Tokenizers and schedulers have none.
        return ["config.json"] if given or files else [] if names else [""]
    if given or files or any(name.endswith(".bin") for name in names):
        return [] if given else [file.name for file in files if file.name not in names]
    if shard := next((found for name in sorted(names) if (found := _SHARD.fullmatch(name))), None):
        return [f"{shard['stem']}.safetensors.index.{shard['variant'] + '.' if shard['variant'] else ''}json"]
    return [f"{'diffusion_pytorch_model' if library == 'diffusers' else 'model'}.safetensors"]


def variant_of(folder: Path, index: Mapping[str, Any], given: Collection[str]) -> str | None:
    """The variant that the weights of a folder have, such as fp16, if there is a part without usual names."""
    found = (weights_of(folder / part).variant for part in parts_of(index) if part not in given)
    return next(filter(None, found), None)
