"""SwanLab, project $SWANLAB_PROJECT or `solrl`; SWANLAB_MODE=offline keeps the run here for `swanlab sync`."""

import os
from collections.abc import Mapping
from pathlib import Path

from PIL import Image

from solrl_trainer.trackers.tracker import TrackedRun, Tracker


class SwanLab(Tracker):
    """A run at SwanLab."""

    package = "swanlab"

    @classmethod
    def reopens(cls) -> bool:
        """Only online runs have an identity."""
        return _mode() == "online"

    def __init__(self, run: TrackedRun) -> None:
        import swanlab

        self._swanlab = swanlab
        mode = _mode()
        known = {"id": run.key, "resume": "allow"} if self.reopens() else {}
        self._run = swanlab.init(
            project=os.environ.get("SWANLAB_PROJECT", "solrl"),
            name=run.name,
            log_dir=str(run.folder / "swanlab"),
            mode=mode,
            config=dict(run.settings),
            **known,
        )

    def figures(self, version: int, figures: Mapping[str, float]) -> None:
        """Values with the version as step."""
        self._run.log(dict(figures), step=version)

    def images(self, version: int, sheet: Image.Image, caption: str) -> None:
        """One image with the version as step."""
        self._run.log({"samples": self._swanlab.Image(sheet, caption=caption)}, step=version)

    def report(self, page: Path) -> None:
        """A file of the run."""
        self._run.save(str(page), base_path=str(page.parent))

    def close(self, *, failed: bool) -> None:
        """Wait for uploads."""
        self._run.finish("crashed" if failed else "success")


def _mode() -> str:
    return os.environ.get("SWANLAB_MODE", "online")
