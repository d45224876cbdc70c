"""A tracker that records what it is told."""

from pathlib import Path
from typing import Any

from PIL import Image
from solrl_trainer.records.trackers.tracker import TrackedRun, Tracker


class Recorder(Tracker):
    """A tracker that keeps what it is told, and fails where it is told to."""

    told: list[tuple[Any, ...]]
    fails_at = ""

    def __init__(self, run: TrackedRun) -> None:
        self._tell("open", run.key)

    def _tell(self, *what: Any) -> None:
        if what[0] == type(self).fails_at:
            raise SystemExit(7) if what[0] == "open" else ConnectionError("no route to the tracker")
        type(self).told.append(what)

    def figures(self, version: int, figures: Any) -> None:
        self._tell("figures", version, *figures)

    def images(self, version: int, sheet: Image.Image, caption: str) -> None:
        self._tell("images", version, sheet.size, caption)

    def report(self, page: Path) -> None:
        self._tell("report", page.name)

    def close(self, *, failed: bool) -> None:
        self._tell("close", failed)
