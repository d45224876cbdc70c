"""Layer lists: the layers of a model that stay in BF16 at a precision, in a JSON file bound to the model's weights.

`solrl-rollout check` writes one. A file may have the lists of several models.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from solrl_proto.identifiers import Precision
from solrl_proto.text_files import naming, read_text

Kept = Mapping[Precision, tuple[str, ...]]
"""Precision → dotted names of the transformer's layers."""


class LayerLists(BaseModel):
    """Content of the file: digest of a transformer → precision → layers that stay in BF16."""

    model_config = ConfigDict(extra="forbid")
    transformers: Annotated[dict[str, dict[Precision, tuple[str, ...]]], Field(min_length=1)]


def read_layer_lists(path: Path) -> LayerLists:
    """Read a file.

    Raises:
        ValueError: it is no layer list.
        OSError: it cannot be read.
    """
    with naming(f"layers {path}", "a file FOLDER/layers.json that `solrl-rollout check --out FOLDER` wrote"):
        text = read_text(path)
    try:
        return LayerLists.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(
            f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}; expected a file of `solrl-rollout check`"
        ) from None


def kept_layers(path: Path, digest: str, model: str) -> Kept:
    """The layers that a file keeps for the model whose transformer has this digest.

    Raises:
        ValueError: the file is of other weights, or is no layer list.
        OSError: it cannot be read.
    """
    lists = read_layer_lists(path).transformers
    if digest not in lists:
        raise ValueError(
            f"{path} has layers of the transformers {', '.join(sorted(lists))}; {model} has {digest}: run "
            f"`solrl-rollout check {model}` for a list of its own"
        )
    return lists[digest]


def write_layer_list(path: Path, digest: str, layers: Kept) -> None:
    """Add a model's layers to a file; layers of the same weights in the file are replaced.

    Raises:
        ValueError: there is a file that is no layer list.
        OSError: it cannot be written.
    """
    lists = dict(read_layer_lists(path).transformers) if path.is_file() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"transformers": lists | {digest: layers}}
    path.write_text(json.dumps(content, indent=1, default=list) + "\n", encoding="utf-8")
