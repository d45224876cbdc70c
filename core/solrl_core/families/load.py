"""Loading a model by name, folder or hub id, through diffusers."""

import json
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch

from solrl_core.families import sana
from solrl_core.families.base import Backbone, ModelOptions

GROUP = "solrl.models"
FAMILIES: dict[str, Callable[[Any, str, ModelOptions], Backbone]] = {sana.PIPELINE: sana.Sana}


def known_models() -> list[str]:
    """Names registered by entry points."""
    return sorted(entry.name for entry in entry_points(group=GROUP))


def locate(model: str) -> str:
    """The folder or hub id behind a name; a folder or hub id stands for itself.

    Raises:
        ValueError: it is neither a registered name, nor a folder, nor shaped like a hub id.
    """
    for entry in entry_points(group=GROUP):
        if entry.name == model:
            return str(entry.load()())
    if Path(model).is_dir() or (model.count("/") == 1 and not model.startswith((".", "/"))):
        return model
    raise ValueError(
        f"got model {model!r}; expected one of {known_models()}, a folder with a model_index.json, "
        "or a hub id such as Efficient-Large-Model/Sana_1600M_1024px_diffusers"
    )


def read_options(folder: str) -> ModelOptions:
    """`solrl.json` of a folder, or defaults where there is none.

    Raises:
        ValueError: the file names an unknown setting or is not JSON.
    """
    path = Path(folder) / "solrl.json"
    if not path.is_file():
        return ModelOptions()
    try:
        settings = json.loads(path.read_text())
        for name in ("quantize", "keep"):
            if settings.get(name) is not None:
                settings[name] = tuple(settings[name])
        for options in settings.get("rewards", {}).values():
            for name, value in options.items():
                if isinstance(value, str) and value.startswith((".", "..")):
                    options[name] = str((path.parent / value).resolve())
        return ModelOptions(**settings)
    except (TypeError, json.JSONDecodeError) as error:
        fields = ", ".join(ModelOptions.__dataclass_fields__)
        raise ValueError(f"{path}: {error}; expected a JSON object with some of: {fields}") from error


def load_backbone(
    model: str, *, device: str = "cpu", revision: str | None = None, token: str | None = None
) -> Backbone:
    """Load a model's pipeline and wrap it in its family.

    On CUDA weights are held and computed in bfloat16. On a CPU they hold the same bfloat16 values in float32,
    because few processors multiply bfloat16 at speed.

    Args:
        model: registered name, local folder in diffusers format, or hub id.
        device: "cpu", "cuda", "cuda:1", …
        revision: hub commit or tag.
        token: for gated models.

    Raises:
        ValueError: unknown model or family.
        OSError: files are missing, offline, or access was not granted.
    """
    from diffusers import DiffusionPipeline
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
    where = locate(model)
    try:
        config = DiffusionPipeline.load_config(where, revision=revision, token=token)
    except Exception as error:
        raise OSError(
            f"cannot read the pipeline of {where!r} ({error}); expected a folder with a model_index.json, or a hub "
            "id that this machine can reach; for gated models pass a token whose account was granted access"
        ) from error
    kind = str(config["_class_name"])
    if kind not in FAMILIES:
        raise ValueError(f"got a pipeline of class {kind} in {where!r}; expected one of {sorted(FAMILIES)}")
    on_cuda = device.startswith("cuda")
    pipeline = DiffusionPipeline.from_pretrained(
        where, revision=revision, token=token, dtype=torch.bfloat16 if on_cuda else torch.float32
    ).to(device)
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            part.eval().requires_grad_(False)
            if not on_cuda:
                for tensor in part.parameters():
                    tensor.copy_(tensor.bfloat16())
    name = model if where != model else Path(model).name.lower()
    return FAMILIES[kind](pipeline, name, read_options(where))
