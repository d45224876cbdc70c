"""Evaluations on disk, with what they were made of."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from solrl_trainer.evaluation import Evaluation
from solrl_trainer.report.gallery import to_bytes

_SETTINGS = "settings"
_IMAGES = "images"
_SCORES = "scores/"


def save_evaluation(path: Path, evaluation: Evaluation, settings: Mapping[str, Any]) -> None:
    """Write an evaluation; its images as bytes, as a gallery keeps them.

    Args:
        path: the file.
        evaluation: what to write.
        settings: all that it depends on, as JSON can say it.
    """
    tensors = {f"{_SCORES}{name}": values.contiguous() for name, values in evaluation.scores.items()}
    partial = path.with_suffix(".partial")
    partial.write_bytes(save(tensors | {_IMAGES: to_bytes(evaluation.images)}, {_SETTINGS: _text(settings)}))
    partial.rename(path)


def load_evaluation(path: Path, settings: Mapping[str, Any]) -> Evaluation | None:
    """Read an evaluation back, with images float32 in [0, 1]; None if there is none of exactly these settings."""
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
