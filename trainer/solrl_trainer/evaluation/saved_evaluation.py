"""Evaluations on disk, with the settings that they depend on."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from solrl_trainer.evaluation.gallery import LARGEST_SIDE
from solrl_trainer.records.evaluations import Evaluation, small_images
from solrl_trainer.records.output_files import write_file

_SETTINGS = "settings"
_IMAGES = "images"
_SCORES = "scores/"


def save_evaluation(path: Path, evaluation: Evaluation, settings: Mapping[str, Any]) -> None:
    """Write an evaluation, with its images as bytes, like a gallery.

    Args:
        path: the file.
        evaluation: the evaluation to write.
        settings: all settings that it depends on, as JSON values.
    """
    tensors = {f"{_SCORES}{name}": values.contiguous() for name, values in evaluation.scores.items()}
    partial = path.with_suffix(".partial")
    write_file(
        partial, save(tensors | {_IMAGES: small_images(evaluation.images, LARGEST_SIDE)}, {_SETTINGS: _text(settings)})
    )
    partial.rename(path)


def load_evaluation(path: Path, settings: Mapping[str, Any]) -> Evaluation | None:
    """Read an evaluation, with images float32 in [0, 1]; None if there is none with exactly these settings."""
    try:
        with safe_open(path, "pt") as file:
            if (file.metadata() or {}).get(_SETTINGS) != _text(settings):
                return None
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
    except (OSError, SafetensorError):
        return None
    scores = {name.removeprefix(_SCORES): values for name, values in tensors.items() if name.startswith(_SCORES)}
    order = [name for name in settings["rewards"] if name in scores]
    return Evaluation(scores={name: scores[name] for name in order}, images=tensors[_IMAGES].float() / 255)


def _text(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings)
