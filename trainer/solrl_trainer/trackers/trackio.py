"""Trackio, project $TRACKIO_PROJECT or `solrl`, in a database of this machine; `trackio show` displays it."""

import os
from collections.abc import Mapping
from pathlib import Path

from PIL import Image

from solrl_trainer.trackers.tracker import TrackedRun, Tracker


class Trackio(Tracker):
    """A run of Trackio, which knows runs by their names."""

    package = "trackio"

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        self._trackio = trackio
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", "solrl"),
            name=f"{run.name}-{run.key[:6]}",
            resume="allow",
            config=dict(run.settings),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def figures(self, version: int, figures: Mapping[str, float]) -> None:
        """Values with the version as step."""
        self._run.log(dict(figures), step=version)

    def images(self, version: int, sheet: Image.Image, caption: str) -> None:
        """One image with the version as step."""
        self._run.log({"samples": self._trackio.Image(sheet, caption=caption)}, step=version)

    def report(self, page: Path) -> None:
        """An artefact."""
        artifact = self._trackio.Artifact(f"report-{self._run.name}", type="report")
        artifact.add_file(str(page))
        self._run.log_artifact(artifact)

    def close(self, *, failed: bool) -> None:
        """Write what is left."""
        self._run.finish()
