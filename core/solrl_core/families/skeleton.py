"""Skeletons: models without weights, built from their configurations on the meta device."""

from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from solrl_core.families.load import explained, family_of, locate
from solrl_core.families.part_files import components, part_class, read_index
from solrl_core.families.pipeline import PipelineBackbone, pipeline_settings
from solrl_core.model_options import MODELS_OWN, ImageSize, read_options

# Files to download from the hub: configurations and tokenizers, no weights.
_PATTERNS = ["*.json", "*/*.json", "*/*.txt", "*/*.model", "*/*.jinja"]


def load_skeleton(model: str, *, revision: str | None = None, size: ImageSize = MODELS_OWN) -> PipelineBackbone:
    """Build a model's pipeline from its configurations alone, in bfloat16 on the meta device.

    The model is a registered name, a local folder (weights may be missing), or a hub id at a commit or tag.

    Raises:
        ValueError: unknown model or family, or a size that the model does not make.
        OSError: configurations are missing, the hub cannot be reached, or access was not granted.
    """
    from diffusers.utils import logging

    logging.set_verbosity_error()
    where = locate(model)
    with explained(where):
        folder = Path(where)
        if not folder.is_dir():
            from huggingface_hub import snapshot_download

            folder = Path(snapshot_download(where, revision=revision, allow_patterns=_PATTERNS))
        index = read_index(folder)
    kind = str(index.get("_class_name"))
    family = family_of(kind, where)
    with explained(where):
        parts = {name: _part(folder / name, *value) for name, value in components(index).items()}
        import diffusers

        pipeline_kind = getattr(diffusers, kind)
        absent = dict.fromkeys(name for name, value in index.items() if isinstance(value, list) and None in value)
        pipeline = pipeline_kind(**absent, **parts, **pipeline_settings(pipeline_kind, index))
    return family(pipeline, folder.name.lower(), read_options(str(folder)).sized(size))


def _part(folder: Path, library: str, kind: str) -> Any:
    cls = part_class(library, kind)
    if not issubclass(cls, torch.nn.Module):
        return cls.from_pretrained(folder)
    with torch.device("meta"):
        if library == "diffusers":
            module = cls.from_config(cls.load_config(folder))
        else:
            module = cls(cls.config_class.from_pretrained(folder))
    return module.to(torch.bfloat16).eval().requires_grad_(False)


class Meta(TorchFunctionMode):
    """Makes the truth value of a meta tensor False, so that code with conditions on values runs on the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return False for `bool` and `item` of a meta tensor; call any other function unchanged."""
        if func in (torch.Tensor.__bool__, torch.Tensor.item) and args[0].is_meta:
            return False
        return func(*args, **(kwargs or {}))
