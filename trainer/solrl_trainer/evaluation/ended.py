"""What a run left in its folder when it ended, and what of that must go when the run trains on."""

from pathlib import Path

from solrl_proto.text_files import TextFileError, read_json

from solrl_trainer.evaluation.gallery import IMAGES, TEXTS

RESULT, EVALUATION, GRID, PAGE = "result.json", "evaluation.json", "grid.png", "report.html"
"""Files of a run's folder; the folder `evaluation` in it has those of `solrl-train evaluate`."""


def drop_end(folder: Path, version: int) -> None:
    """Delete figures and images of versions after `version`, from which the run goes on, and the report.

    The run writes them again when it ends; `solrl-train report` draws a report at any time.
    """
    for place, name in ((folder, RESULT), (folder / "evaluation", EVALUATION)):
        if (place / name).is_file() and _version(place / name) > version:
            for one in (name, TEXTS, IMAGES, GRID):
                (place / one).unlink(missing_ok=True)
    (folder / PAGE).unlink(missing_ok=True)


def _version(path: Path) -> float:
    """The version that a result is of; infinite if the file is damaged, as by a crash."""
    try:
        found = read_json(path)
        return float(found["version" if path.name == EVALUATION else "iterations"])
    except (TextFileError, KeyError, TypeError, ValueError):
        return float("inf")
