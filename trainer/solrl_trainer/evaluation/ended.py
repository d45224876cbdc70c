"""Files that a run leaves in its folder when it ends, and their removal when the run trains on."""

import math
from pathlib import Path

from solrl_proto.text_files import TextFileError, read_json

from solrl_trainer.evaluation.gallery import IMAGES, TEXTS

RESULT, EVALUATION, GRID, PAGE = "result.json", "evaluation.json", "grid.png", "report.html"
"""Files of a run's folder, and of the folder `evaluation` in it, which `solrl-train evaluate` writes."""


def remove_results_after(folder: Path, version: int, *, continues: bool) -> None:
    """Delete figures and images of versions after `version`, where the run goes on, and the report.

    The run writes them again when it ends; `solrl-train report` draws a report at any time. If the run trains further
    (`continues`), a result that says why it ended no longer holds.
    """
    for place, name in ((folder, RESULT), (folder / "evaluation", EVALUATION)):
        if (place / name).is_file() and _complete_until(place / name, continues=continues) > version:
            for file in (name, TEXTS, IMAGES, GRID):
                (place / file).unlink(missing_ok=True)
    (folder / PAGE).unlink(missing_ok=True)


def best_version(folder: Path) -> int | None:
    """The version that a run exported as its best; None if it took its newest. TextFileError: a damaged result."""
    result = read_json(folder / RESULT) if (folder / RESULT).is_file() else {}
    return int(result["version"]) if result.get("stopped") else None


def _complete_until(path: Path, *, continues: bool) -> float:
    """The newest version that a result speaks of; infinite if that was the end but it goes on, or it is damaged."""
    try:
        result = read_json(path)
        version = float(result["version" if path.name == EVALUATION else "iterations"])
        return math.inf if continues and result.get("stopped") else version
    except (AttributeError, TextFileError, KeyError, TypeError, ValueError):
        return math.inf
