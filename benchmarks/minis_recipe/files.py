"""Loading and saving of pipelines and parts in a recipe's output folder."""

import json
from pathlib import Path
from typing import Any

import diffusers
import torch
from solrl_proto.text_files import read_json

from minis_recipe.family import Family


def load_pipeline(folder: Path) -> Any:
    """Load a trained pipeline in float32."""
    return diffusers.DiffusionPipeline.from_pretrained(folder, dtype=torch.float32)


def load_autoencoder(folder: Path, device: str) -> Any:
    """Load the trained autoencoder of a miniature pipeline in float32."""
    kind = read_json(folder / "vae" / "config.json")["_class_name"]
    model = getattr(diffusers, kind).from_pretrained(folder / "vae", torch_dtype=torch.float32)
    return model.to(device).eval()


def save_part(model: Any, folder: Path) -> None:
    """Save a model in BF16, without `_name_or_path` in its configuration."""
    model.to(torch.bfloat16).save_pretrained(folder)
    forget_origin(folder)


def save_pipeline(pipeline: Any, family: Family, folder: Path) -> None:
    """Save a pipeline in BF16, with its `solrl.json`."""
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            part._compiled_call_impl = None
            part.to(torch.bfloat16)
    pipeline.save_pretrained(folder)
    forget_origin(folder)
    (folder / "solrl.json").write_text(json.dumps(family.options, indent=2) + "\n", encoding="utf-8")


def forget_origin(folder: Path) -> None:
    """Remove `_name_or_path`, a path on the training machine, from all configurations in a folder."""
    for file in folder.rglob("*.json"):
        content = read_json(file)
        if isinstance(content, dict) and content.pop("_name_or_path", None) is not None:
            file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
